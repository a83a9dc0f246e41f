"""The memory that a repair costs, and the time that it saves according to a GPU's profile."""

from collections import Counter
from contextlib import suppress
from dataclasses import dataclass

from vllm_gac.errors import ProfileError
from vllm_gac.gpu.latency.layer import BatchMix, Deployment
from vllm_gac.gpu.profile import Types
from vllm_gac.gpu.profile_files import read_profile
from vllm_gac.layout.dims import ModelLayout
from vllm_gac.layout.schema import Role
from vllm_gac.planning.request import PREDICTED
from vllm_gac.steps.inspect import KV_CACHE_BYTES
from vllm_gac.steps.repair.request import RepairRequest


@dataclass(frozen=True, slots=True)
class Size:
    """A quantity before and after a repair."""

    before: float
    after: float
    overhead_percent: float


@dataclass(frozen=True, slots=True)
class Change:
    """`count` dims of a role that are padded from `before` to `after`."""

    role: Role
    before: int
    after: int
    count: int
    overhead_percent: float


@dataclass(frozen=True, slots=True)
class RepairReport:
    """A repair in numbers.

    Attributes:
        parameters: Number of weights.
        kv_bytes_per_token: Of all layers, with 2 bytes per number.
        microseconds: Predicted time of all layers in a mean step on one GPU of those that share
            them, without all-reduce; None if no GPU is named, or its profile has no times of such
            layers or of the request's quantization.
        changes: The dims that are padded.
    """

    parameters: Size
    kv_bytes_per_token: Size
    microseconds: Size | None
    changes: list[Change]


def repair_report(
    before: ModelLayout, after: ModelLayout, request: RepairRequest | None = None
) -> RepairReport:
    """Report what padding the layout `before` to the layout `after` costs and gains.

    Times are of one GPU's part of the layers, predicted by the profile of the request's GPU for the
    steps of a `BatchMix`. Raises ProfileError if there is no such profile.
    """
    request = request or RepairRequest()
    pairs = Counter(
        (role, dim, other)
        for (_, role, dim), (_, _, other) in zip(before.dims(), after.dims(), strict=True)
        if dim != other
    )
    return RepairReport(
        parameters=_size(before.parameters, after.parameters),
        kv_bytes_per_token=_size(
            before.kv_elements * KV_CACHE_BYTES, after.kv_elements * KV_CACHE_BYTES
        ),
        microseconds=_time(before, after, request),
        changes=[
            Change(role, dim, other, count, _percent(other, dim))
            for (role, dim, other), count in sorted(pairs.items())
        ],
    )


def _time(before: ModelLayout, after: ModelLayout, request: RepairRequest) -> Size | None:
    weights = PREDICTED.get(request.quantization)
    if request.gpu is None or before.experts or (request.quantization and weights is None):
        return None
    there = Deployment(
        read_profile(request.gpu),
        BatchMix(),
        Types(weights or "bf16"),
        request.tensor_parallel_size,
    )
    with suppress(ProfileError):  # it has no times of such layers
        return _size(*(there.nanoseconds(of, of.layers) / 1000 for of in (before, after)))
    return None


def _size(before: float, after: float) -> Size:
    return Size(before, after, _percent(after, before))


def _percent(now: float, before: float) -> float:
    return 100 * (now / before - 1)

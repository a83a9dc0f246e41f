"""The memory that a repair costs, and the time that it saves according to a GPU's profile."""

from collections import Counter
from dataclasses import dataclass

from vllm_gac.gpu.latency.layer import BatchMix, Deployment
from vllm_gac.gpu.profile_files import read_profile
from vllm_gac.layout.dims import ModelLayout
from vllm_gac.layout.schema import Role
from vllm_gac.steps.inspect import KV_CACHE_BYTES


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
        microseconds: Predicted time of all layers in a mean step; None if no GPU is named, or its
            profile has no times of such layers.
        changes: The dims that are padded.
    """

    parameters: Size
    kv_bytes_per_token: Size
    microseconds: Size | None
    changes: list[Change]


def repair_report(
    before: ModelLayout,
    after: ModelLayout,
    gpu: str | None = None,
    tensor_parallel_size: int = 1,
) -> RepairReport:
    """Report what padding the layout `before` to the layout `after` costs and gains.

    Times are of the part of each of `tensor_parallel_size` GPUs, predicted by the profile of `gpu`
    for the steps of a `BatchMix`. Raises ProfileError if there is no such profile.
    """
    time = None
    if gpu is not None and not before.experts:
        there = Deployment(read_profile(gpu), BatchMix(), tensor_parallel_size=tensor_parallel_size)
        time = _size(*(there.nanoseconds(of, of.layers) / 1000 for of in (before, after)))
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
        microseconds=time,
        changes=[
            Change(role, dim, other, count, _percent(other, dim))
            for (role, dim, other), count in sorted(pairs.items())
        ],
    )


def _size(before: float, after: float) -> Size:
    return Size(before, after, _percent(after, before))


def _percent(now: float, before: float) -> float:
    return 100 * (now / before - 1)

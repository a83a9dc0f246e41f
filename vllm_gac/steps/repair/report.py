"""The memory that a repair costs, and the time that it saves according to a GPU's profile.

As in tables 7 and 8 of the GAC paper. The time is that of the kernels with the padded dim, not of a
whole model.
"""

from collections import Counter
from dataclasses import dataclass

from vllm_gac.alignment.fastest_dim import time_ratio
from vllm_gac.layout.dims import ModelLayout
from vllm_gac.layout.rounding import ceil_div
from vllm_gac.layout.schema import Role
from vllm_gac.steps.inspect import KV_CACHE_BYTES


@dataclass(frozen=True, slots=True)
class Size:
    """A quantity before and after a repair."""

    before: int
    after: int
    overhead_percent: float


@dataclass(frozen=True, slots=True)
class Change:
    """`count` dims of a role that are padded from `before` to `after`.

    `gain_percent` is the time that the kernels save; None if no profile measured both dims.
    """

    role: Role
    before: int
    after: int
    count: int
    overhead_percent: float
    gain_percent: float | None


@dataclass(frozen=True, slots=True)
class RepairReport:
    """A repair in numbers; `kv_bytes_per_token` is of all layers, with 2 bytes per number."""

    parameters: Size
    kv_bytes_per_token: Size
    changes: list[Change]


def repair_report(
    before: ModelLayout, after: ModelLayout, gpu: str | None = None, tp: int = 1
) -> RepairReport:
    """Report what padding the layout `before` to the layout `after` costs and gains.

    Gains are computed from the profile of `gpu`, if given, for the part of each width that one of
    `tp` GPUs has. Raises ProfileError if there is no such profile.
    """
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
        changes=[
            Change(role, dim, other, count, _percent(other, dim), _gain(role, dim, other, gpu, tp))
            for (role, dim, other), count in sorted(pairs.items())
        ],
    )


def _size(before: int, after: int) -> Size:
    return Size(before, after, _percent(after, before))


def _gain(role: Role, before: int, after: int, gpu: str | None, tp: int) -> float | None:
    if gpu is None:
        return None
    parts = tp if role == "width" else 1
    ratio = time_ratio(ceil_div(before, parts), ceil_div(after, parts), role, gpu)
    return None if ratio is None else 100 * (1 - ratio)


def _percent(now: int, before: int) -> float:
    return 100 * (now / before - 1)

"""The memory that a repair costs, and the time that it saves according to a GPU's profile.

As in tables 7 to 9 and figure 5 of the GAC paper: return on investment (ROI) = time saved / memory
added, both in percent. The time is that of the kernels with the padded dim, not of a whole model.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

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
    """`count` dims of a role that are padded from `before` to `after`, which may be equal.

    `gain_percent` is the time that the kernels save; None if no profile measured both dims. `roi`
    is the gain divided by the overhead; None if either is missing or the overhead is 0.
    """

    role: Role
    before: int
    after: int
    count: int
    overhead_percent: float
    gain_percent: float | None
    roi: float | None


@dataclass(frozen=True, slots=True)
class RoleTotal:
    """All dims of a role: how many change, by how much their sum grows, and the mean gain."""

    dims: int
    changed: int
    overhead_percent: float
    gain_percent: float | None
    roi: float | None


@dataclass(frozen=True, slots=True)
class RepairReport:
    """A repair in numbers; `kv_bytes_per_token` is of all layers, with 2 bytes per number."""

    parameters: Size
    kv_bytes_per_token: Size
    roles: dict[Role, RoleTotal]
    changes: list[Change]

    def as_json(self) -> dict[str, Any]:
        """The report as JSON values."""
        return asdict(self)


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
    )
    changes = [
        _change(role, dim, other, count, gpu, tp)
        for (role, dim, other), count in sorted(pairs.items())
    ]
    roles = sorted({change.role for change in changes})
    return RepairReport(
        parameters=_size(before.parameters, after.parameters),
        kv_bytes_per_token=_size(
            before.kv_elements * KV_CACHE_BYTES, after.kv_elements * KV_CACHE_BYTES
        ),
        roles={role: _total([c for c in changes if c.role == role]) for role in roles},
        changes=[change for change in changes if change.before != change.after],
    )


def _size(before: int, after: int) -> Size:
    return Size(before, after, _percent(after, before))


def _change(role: Role, before: int, after: int, count: int, gpu: str | None, tp: int) -> Change:
    overhead = _percent(after, before)
    gain = 0.0 if before == after and gpu is not None else _gain(role, before, after, gpu, tp)
    return Change(role, before, after, count, overhead, gain, _roi(gain, overhead))


def _gain(role: Role, before: int, after: int, gpu: str | None, tp: int) -> float | None:
    if gpu is None:
        return None
    parts = tp if role == "width" else 1
    ratio = time_ratio(ceil_div(before, parts), ceil_div(after, parts), role, gpu)
    return None if ratio is None else 100 * (1 - ratio)


def _total(changes: Sequence[Change]) -> RoleTotal:
    dims = sum(c.count for c in changes)
    overhead = _percent(
        sum(c.after * c.count for c in changes), sum(c.before * c.count for c in changes)
    )
    gains = [c.gain_percent * c.count for c in changes if c.gain_percent is not None]
    gain = sum(gains) / dims if len(gains) == len(changes) else None
    changed = sum(c.count for c in changes if c.before != c.after)
    return RoleTotal(dims, changed, overhead, gain, _roi(gain, overhead))


def _percent(now: int, before: int) -> float:
    return 100 * (now / before - 1)


def _roi(gain: float | None, overhead: float) -> float | None:
    return gain / overhead if gain is not None and overhead > 0 else None

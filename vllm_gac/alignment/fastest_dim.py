"""Which dim nearby a GPU's kernels take fastest, by its profile."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache

from vllm_gac.gpu.profile import GpuProfile
from vllm_gac.gpu.profile_files import DEFAULT_GPU, read_profile
from vllm_gac.layout.rounding import round_up
from vllm_gac.layout.schema import Role

# Where nothing was measured, a tensor core tile; kernels refuse or crawl off multiples of 8.
_UNMEASURED_MULTIPLE = 16
_KERNEL_MULTIPLE = 8
# How far a faster dim is looked for: beyond the next multiple of 64 there is none that a larger
# tile would explain, only a larger model.
_WINDOW_MULTIPLE = 64


def fastest_dim(dim: int, role: Role, gpu: str | None = None) -> int:
    """The fastest dim from `dim` to the next multiple of 64; of equally fast ones the smallest.

    Only measured dims compete. If the next multiple of 16 is smaller than the winner but was not
    measured, it is taken: nothing says that it is slower. Head sizes are judged by attention,
    ranks and widths by the GEMMs with that dim as N and as K, with the same weight for every
    batch size. Raises ProfileError if there is no profile of `gpu`.
    """
    profile = read_profile(gpu or DEFAULT_GPU)
    window = range(dim, round_up(dim, _WINDOW_MULTIPLE) + 1)
    slowdown = _slowdowns(_times(profile, role), window)
    safe = round_up(dim, _UNMEASURED_MULTIPLE)
    if not slowdown:
        return safe
    fastest = min(slowdown.values())
    winner = min(d for d, s in slowdown.items() if s <= fastest * (1 + profile.noise))
    return winner if safe in slowdown else min(winner, safe)


def time_ratio(dim: int, other: int, role: Role, gpu: str | None = None) -> float | None:
    """The time of `role`'s kernels with `other` over theirs with `dim`, by the profile of `gpu`.

    Geometric mean over batch sizes, of the sweeps that measured both dims; None if none did.
    Raises ProfileError if there is no profile of `gpu`.
    """
    total: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for batch, times in _times(read_profile(gpu or DEFAULT_GPU), role):
        if dim in times and other in times:
            total[batch][0] += times[dim]
            total[batch][1] += times[other]
    if not total:
        return None
    return math.exp(sum(math.log(after / before) for before, after in total.values()) / len(total))


@cache
def _times(profile: GpuProfile, role: Role) -> list[tuple[int, Mapping[int, float]]]:
    """(batch size, microseconds by dim) of each sweep that speaks of `role`."""
    if role == "head":
        sweeps = [(s.batch, s) for s in profile.attention]
        return [(batch, dict(zip(s.dims, s.microseconds, strict=True))) for batch, s in sweeps]
    return [
        (sweep.m, dict(zip(sweep.dims, sweep.microseconds, strict=True)))
        for sweep in profile.gemm
        if sweep.role in (role, "any")
    ]


def _slowdowns(
    sweeps: Sequence[tuple[int, Mapping[int, float]]], window: range
) -> dict[int, float]:
    """Geometric mean over batch sizes of a dim's time against the best in `window`, by dim.

    Of the dims in `window` that are multiples of 8 and in every sweep that reaches into it.
    """
    covering = [(m, times) for m, times in sweeps if any(d in window for d in times)]
    if not covering:
        return {}
    dims = set.intersection(*({d for d in times if d in window} for _, times in covering))
    dims = {d for d in dims if d % _KERNEL_MULTIPLE == 0}
    if not dims:
        return {}
    total: dict[int, dict[int, float]] = defaultdict(lambda: dict.fromkeys(dims, 0.0))
    for m, times in covering:
        for d in dims:
            total[m][d] += times[d]
    return {
        d: math.exp(
            sum(math.log(times[d] / min(times.values())) for times in total.values()) / len(total)
        )
        for d in dims
    }

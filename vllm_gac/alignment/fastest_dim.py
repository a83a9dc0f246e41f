"""The nearby dim at which a GPU's kernels are fastest, according to its profile."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache

from vllm_gac.gpu.profile import GpuProfile
from vllm_gac.gpu.profile_files import DEFAULT_GPU, read_profile
from vllm_gac.layout.rounding import round_up
from vllm_gac.layout.schema import Role

# Where nothing was measured, dims become whole tensor core tiles. Dims that are not multiples of 8
# are refused by some kernels and very slow in the others.
_UNMEASURED_MULTIPLE = 16
_KERNEL_MULTIPLE = 8
# The search ends at the next multiple of 64: no tile is larger, so a larger dim is only more work.
_WINDOW_MULTIPLE = 64


def fastest_dim(dim: int, role: Role, gpu: str | None = None) -> int:
    """The fastest dim from `dim` to the next multiple of 64; the smallest one if several are equal.

    Only measured dims compete. If the next multiple of 16 is smaller than the winner and was not
    measured, the function returns that multiple: no measurement says that it is slower.

    Args:
        dim: the smallest dim to consider.
        role: head sizes are compared by attention times; ranks and widths by the times of GEMMs
            with that dim as N and as K. Every batch size has the same weight.
        gpu: name of a shipped profile or path of a profile.json; None is the default GPU.

    Raises:
        ProfileError: if there is no profile of `gpu`.
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
    """The time of `role`'s kernels at `other` divided by their time at `dim`.

    Returns:
        The geometric mean over batch sizes, from the sweeps of `gpu`'s profile that measured both
        dims; None if no sweep did.

    Raises:
        ProfileError: if there is no profile of `gpu`.
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
    """(batch size, microseconds by dim) of each sweep that covers `role`."""
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
    """By dim: its time over the best time in `window`, as the geometric mean over batch sizes.

    Only dims in `window` count that are multiples of 8 and that every sweep reaching into the
    window has measured.
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

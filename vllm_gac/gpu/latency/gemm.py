"""Predicted time of a linear y[m, n] = x[m, k] w, from a profile's sweeps over n and over k.

A time is the roofline, max(bytes / bandwidth, FLOP / peak), times a slowdown, whose logarithm is
interpolated: over a coarse grid of (n, k), corrected by what two fine lines of the grid, one over n
and one over k, say beside it. Dims that are not multiples of 64 run as the next multiple would, and
pay what their alignment class (the largest power of two in them) was measured to cost on top.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Literal, TypeAlias, get_args

from vllm_gac.errors import ProfileError
from vllm_gac.gpu.latency.interpolation import between, interpolate
from vllm_gac.gpu.profile import GpuProfile, LinearSweep
from vllm_gac.layout.rounding import round_up

Axis: TypeAlias = Literal["n", "k"]
# Log of a slowdown, by log of a dim, ascending.
Curve: TypeAlias = tuple[tuple[float, ...], tuple[float, ...]]

# Tiles of tensor cores end here; wider multiples differ by whole tiles, which the curve shows.
_TILE = 64
_BYTES = 2  # of a weight or an activation


def gemm_microseconds(m: int, n: int, k: int, profile: GpuProfile) -> float:
    """Time of y[m, n] = x[m, k] w in 16-bit types, the weights read from memory.

    Between measured m, slowdowns are interpolated over log m. Never below the fastest GEMM that was
    measured, nor further below the roofline than any of that m. Raises ProfileError if the profile
    has no sweep over n or none over k.
    """
    return _gemm_times(profile).microseconds(m, n, k)


@dataclass(frozen=True, slots=True)
class Roofline:
    """The two ceilings of a GPU: bytes and FLOP a microsecond."""

    bandwidth: float
    peak: float

    def gemm(self, m: int, n: int, k: int) -> float:
        """Microseconds below which no y[m, n] = x[m, k] w can be, in 16-bit types."""
        moved = _BYTES * (m * k + k * n + m * n)
        return max(moved / self.bandwidth, 2 * m * n * k / self.peak)

    def moving(self, elements: float) -> float:
        """Microseconds of reading or writing so many 16-bit numbers."""
        return _BYTES * elements / self.bandwidth


@cache
def roofline(profile: GpuProfile) -> Roofline:
    """The profile's ceilings. Raises ProfileError if it has none."""
    if profile.ceilings is None:
        raise ProfileError(
            f"the profile of {profile.gpu}, measured {profile.measured}, has no ceilings, which "
            "predicting times starts from; measure again with vllm-gac profile"
        )
    rates = profile.ceilings
    return Roofline(rates.terabytes_per_second * 1e6, rates.teraflops * 1e6)


@dataclass(frozen=True, slots=True)
class _Line:
    """Slowdowns over one axis at one m, the other dim fixed."""

    tiles: Curve  # at multiples of 64
    classes: Mapping[int, Curve]  # extra cost by alignment class, at the next multiple of 64

    def cliff(self, dim: int) -> float:
        """Log of what it costs on top that `dim` is not a multiple of 64; never negative.

        At least what better aligned dims cost.
        """
        if dim % _TILE == 0:
            return 0.0
        at, own = math.log(_next_tile(dim)), _alignment(dim)
        costs = (interpolate(*c, at) for of, c in self.classes.items() if of >= own)
        return max(0.0, *costs, 0.0)


@dataclass(frozen=True, slots=True)
class _Surface:
    """Slowdowns over both axes at one m."""

    m: int
    rows: tuple[tuple[float, ...], tuple[Curve, ...]]  # log k, and the curve over n there
    lines: Mapping[Axis, _Line]
    corrections: Mapping[Axis, Curve]  # what a line says beside the rows
    least: float  # the least slowdown measured
    fastest: float  # microseconds of the fastest GEMM measured

    def slowdown(self, n: int, k: int) -> float:
        """Log of the slowdown of [m, k] @ [k, n] against the roofline of its whole tiles."""
        at_n, at_k = math.log(_next_tile(n)), math.log(_next_tile(k))
        low, high, weight = between(self.rows[0], at_k)
        curves = self.rows[1]
        smooth = (1 - weight) * interpolate(*curves[low], at_n)
        smooth += weight * interpolate(*curves[high], at_n)
        fine = interpolate(*self.corrections["n"], at_n) + interpolate(*self.corrections["k"], at_k)
        cliff = max(self.lines["n"].cliff(n), self.lines["k"].cliff(k))
        return max(smooth + fine, self.least) + cliff


class _GemmTimes:
    """Everything that predicting takes, made of a profile once."""

    def __init__(self, profile: GpuProfile) -> None:
        self.roofline = roofline(profile)
        by_m: dict[int, list[LinearSweep]] = defaultdict(list)
        for sweep in profile.linear:
            by_m[sweep.m].append(sweep)
        if not by_m or any({s.axis for s in sweeps} != {"n", "k"} for sweeps in by_m.values()):
            raise ProfileError(
                f"the profile of {profile.gpu}, measured {profile.measured}, has no sweeps of "
                "linears over both n and k; measure again with vllm-gac profile"
            )
        self.surfaces = [_surface(self.roofline, m, by_m[m]) for m in sorted(by_m)]
        self.log_m = [math.log(m) for m in sorted(by_m)]

    @lru_cache(maxsize=1 << 16)  # noqa: B019 -- lives as long as the profile it belongs to
    def microseconds(self, m: int, n: int, k: int) -> float:
        index, above, weight = between(self.log_m, math.log(m))
        low, high = self.surfaces[index], self.surfaces[above]
        slowdown = (1 - weight) * low.slowdown(n, k) + weight * high.slowdown(n, k)
        fastest: float = low.fastest ** (1 - weight) * high.fastest**weight
        ideal = self.roofline.gemm(m, _next_tile(n), _next_tile(k))
        return max(ideal * math.exp(slowdown), fastest)


@cache
def _gemm_times(profile: GpuProfile) -> _GemmTimes:
    return _GemmTimes(profile)


def _surface(ceilings: Roofline, m: int, sweeps: Sequence[LinearSweep]) -> _Surface:
    """What the sweeps at `m` say. The longest over each axis is its fine line."""
    longest = {
        axis: max((s for s in sweeps if s.axis == axis), key=lambda s: len(s.dims))
        for axis in get_args(Axis)
    }
    lines: dict[Axis, _Line] = {axis: _line(ceilings, s) for axis, s in longest.items()}
    over_n = {s.fixed: _line(ceilings, s).tiles for s in sweeps if s.axis == "n"}
    coarse = set.intersection(*(set(curve[0]) for curve in over_n.values()))
    rows = {math.log(k): _only(over_n[k], coarse) for k in sorted(over_n)}
    corrections: dict[Axis, Curve] = {
        "n": _minus(lines["n"].tiles, rows[math.log(longest["n"].fixed)]),
        "k": _minus(lines["k"].tiles, _column(rows, longest["k"].fixed)),
    }
    return _Surface(
        m=m,
        rows=(tuple(rows), tuple(rows.values())),
        lines=lines,
        corrections=corrections,
        least=min(min(curve[1]) for curve in (*over_n.values(), lines["k"].tiles)),
        fastest=min(min(s.microseconds) for s in sweeps),
    )


def _line(ceilings: Roofline, sweep: LinearSweep) -> _Line:
    def ideal(dim: int) -> float:
        n, k = (dim, sweep.fixed) if sweep.axis == "n" else (sweep.fixed, dim)
        return ceilings.gemm(sweep.m, n, k)

    times = dict(zip(sweep.dims, sweep.microseconds, strict=True))
    tiles = _curve(
        (math.log(dim), math.log(time / ideal(dim)))
        for dim, time in times.items()
        if dim % _TILE == 0
    )
    extra: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for dim, time in times.items():
        if dim % _TILE:
            at = math.log(_next_tile(dim))
            whole = ideal(_next_tile(dim)) * math.exp(interpolate(*tiles, at))
            extra[_alignment(dim)].append((at, math.log(time / whole)))
    return _Line(tiles, {of: _curve(costs) for of, costs in extra.items()})


def _column(rows: Mapping[float, Curve], n: int) -> Curve:
    """The slowdowns that `rows` have at `n`, over log k."""
    return tuple(rows), tuple(interpolate(*curve, math.log(n)) for curve in rows.values())


def _minus(line: Curve, smooth: Curve) -> Curve:
    return line[0], tuple(y - interpolate(*smooth, x) for x, y in zip(*line, strict=True))


def _only(curve: Curve, xs: Set[float]) -> Curve:
    return _curve((x, y) for x, y in zip(*curve, strict=True) if x in xs)


def _curve(points: Iterable[tuple[float, float]]) -> Curve:
    """The points in ascending order; those at the same place become their mean."""
    at: dict[float, list[float]] = defaultdict(list)
    for x, y in points:
        at[x].append(y)
    rising = sorted(at)
    return tuple(rising), tuple(sum(at[x]) / len(at[x]) for x in rising)


def _alignment(dim: int) -> int:
    """The largest power of two that divides `dim`."""
    return dim & -dim


def _next_tile(dim: int) -> int:
    return round_up(dim, _TILE)

"""Predicted time of a linear y[m, n] = x[m, k] w, from a profile's sweeps over n and over k.

A time is the roofline, max(bytes / bandwidth, FLOP / peak), times a slowdown. The logarithm of the
slowdown is interpolated over a coarse grid of (n, k), and corrected by two fine sweeps, one over n
and one over k. A dim that is not a multiple of 64 takes the time of the next multiple, plus the
measured cost of its alignment class (the largest power of two that divides it).

In FP8, dims that are not multiples of 16 cost what they are padded to; in W4A16, of 64.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Literal, TypeAlias, get_args

from vllm_gac.errors import ProfileError
from vllm_gac.gpu.latency.interpolation import between, interpolate
from vllm_gac.gpu.profile import NAMES, W4A16_GROUP, GpuProfile, LinearSweep, WeightsDtype
from vllm_gac.layout.rounding import round_up

Axis: TypeAlias = Literal["n", "k"]
# (logs of dims, ascending; logs of slowdowns)
Curve: TypeAlias = tuple[tuple[float, ...], tuple[float, ...]]

# Within multiples of 64 the alignment of a dim decides; beyond, the number of whole tiles, which
# the curves contain.
_TILE = 64
_BYTES = 2  # of a number that is not FP8
# Of both dims of a weight; others are padded.
_MULTIPLES: dict[WeightsDtype, int] = {"bf16": 1, "fp8": 16, "w4a16": 64}


def gemm_microseconds(
    m: int,
    n: int,
    k: int,
    profile: GpuProfile,
    *,
    is_sustained: bool = False,
    dtype: WeightsDtype = "bf16",
) -> float:
    """Microseconds of y[m, n] = x[m, k] w, with w read from memory, and y in 16 bits.

    Between measured m, slowdowns are interpolated over log m. No prediction is below the fastest
    measured GEMM, or further below the roofline than any measurement at that m.

    `is_sustained`: whether GEMMs run for long without a rest, as in prefill under load. `dtype` is
    that of w and x. Quantizing x takes its own time (gpu/latency/passes.py). Raises ProfileError if
    the profile has no ceilings, or no sweep over n or over k of this type.
    """
    n, k = round_up(n, _MULTIPLES[dtype]), round_up(k, _MULTIPLES[dtype])
    time = _gemm_times(profile, dtype).microseconds(m, n, k)
    if not (is_sustained and profile.sustained):
        return time
    return time + _excess(profile, dtype) * roofline(profile, dtype).multiplying(m, n, k)


def moving_microseconds(elements: float, profile: GpuProfile) -> float:
    """Time of a kernel that only reads and writes so many 16-bit `elements`.

    With few of them it is the time of a launch: that of the fastest measured GEMM, which is hardly
    more. Raises ProfileError as `gemm_microseconds` does.
    """
    return max(roofline(profile).moving(elements), _gemm_times(profile, "bf16").fastest)


@dataclass(frozen=True, slots=True)
class Roofline:
    """The two ceilings of a GPU, bytes and FLOP per microsecond, and the bytes of x and of w."""

    bandwidth: float
    peak: float
    x_bytes: float = _BYTES
    w_bytes: float = _BYTES

    def gemm(self, m: int, n: int, k: int) -> float:
        """Least possible microseconds of y[m, n] = x[m, k] w, with y in 16 bits."""
        moved = self.x_bytes * m * k + self.w_bytes * k * n + _BYTES * m * n
        return max(moved / self.bandwidth, self.multiplying(m, n, k))

    def multiplying(self, m: int, n: int, k: int) -> float:
        """Microseconds of the FLOP of y[m, n] = x[m, k] w."""
        return 2 * m * n * k / self.peak

    def moving(self, elements: float) -> float:
        """Microseconds of reading or writing so many 16-bit `elements`."""
        return _BYTES * elements / self.bandwidth


@cache
def roofline(profile: GpuProfile, dtype: WeightsDtype = "bf16") -> Roofline:
    """The profile's ceilings for GEMMs of `dtype`. Raises ProfileError if it has none.

    Tensor cores multiply FP8 twice as fast as 16-bit types, unless the profile knows better.
    """
    if profile.ceilings is None:
        raise ProfileError(
            f"the profile of {profile.gpu}, measured {profile.measured}, has no ceilings, which "
            "predicting times needs; measure again with vllm-gac profile"
        )
    rates = profile.ceilings
    bandwidth = rates.terabytes_per_second * 1e6
    if dtype == "fp8":
        return Roofline(bandwidth, (rates.fp8_teraflops or 2 * rates.teraflops) * 1e6, 1, 1)
    w_bytes = 1 / 2 + 2 / W4A16_GROUP if dtype == "w4a16" else _BYTES
    return Roofline(bandwidth, rates.teraflops * 1e6, w_bytes=w_bytes)


@dataclass(frozen=True, slots=True)
class _Line:
    """Slowdowns over one axis at one m, the other dim fixed."""

    tiles: Curve  # at multiples of 64
    classes: Mapping[int, Curve]  # extra cost by alignment class, at the next multiple of 64

    def cliff(self, dim: int) -> float:
        """Log of the extra cost if `dim` is not a multiple of 64; never negative.

        It is at least the cost of better aligned dims.
        """
        if dim % _TILE == 0:
            return 0.0
        at, alignment_of_dim = math.log(_next_tile(dim)), _alignment(dim)
        costs = (
            interpolate(*curve, at)
            for alignment, curve in self.classes.items()
            if alignment >= alignment_of_dim
        )
        return max(0.0, *costs, 0.0)


@dataclass(frozen=True, slots=True)
class _Surface:
    """Slowdowns over both axes at one m."""

    m: int
    rows: tuple[tuple[float, ...], tuple[Curve, ...]]  # logs of k, and a curve over n at each
    lines: Mapping[Axis, _Line]
    corrections: Mapping[Axis, Curve]  # the line's slowdown minus the rows'
    min_slowdown: float  # the least slowdown measured
    fastest: float  # microseconds of the fastest GEMM measured

    def slowdown(self, n: int, k: int) -> float:
        """Log of (time / roofline) of [m, k] @ [k, n], with n and k rounded up to whole tiles."""
        at_n, at_k = math.log(_next_tile(n)), math.log(_next_tile(k))
        low, high, weight = between(self.rows[0], at_k)
        curves = self.rows[1]
        smooth = (1 - weight) * interpolate(*curves[low], at_n)
        smooth += weight * interpolate(*curves[high], at_n)
        fine = interpolate(*self.corrections["n"], at_n) + interpolate(*self.corrections["k"], at_k)
        cliff = max(self.lines["n"].cliff(n), self.lines["k"].cliff(k))
        return max(smooth + fine, self.min_slowdown) + cliff


class _GemmTimes:
    """Everything that a prediction needs, computed once per profile."""

    def __init__(self, profile: GpuProfile, dtype: WeightsDtype) -> None:
        self.roofline = roofline(profile, dtype)
        by_m: dict[int, list[LinearSweep]] = defaultdict(list)
        for sweep in profile.linear:
            if sweep.dtype == dtype and _tiles_of(sweep):
                by_m[sweep.m].append(sweep)
        if not by_m or not all(map(_suffice, by_m.values())):
            raise ProfileError(
                f"the profile of {profile.gpu}, measured {profile.measured}, has no sweeps of "
                f"linears in {NAMES[dtype]} over both n and k, at multiples of {_TILE} in common; "
                "measure them on that GPU with vllm-gac profile --resume --out profile.json, and "
                "give --gpu profile.json"
            )
        self.surfaces = [_surface(self.roofline, m, by_m[m]) for m in sorted(by_m)]
        self.log_m = [math.log(m) for m in sorted(by_m)]
        self.fastest = min(surface.fastest for surface in self.surfaces)

    @lru_cache(maxsize=1 << 16)  # noqa: B019 -- lives as long as the profile it belongs to
    def microseconds(self, m: int, n: int, k: int) -> float:
        index, above, weight = between(self.log_m, math.log(m))
        low, high = self.surfaces[index], self.surfaces[above]
        slowdown = (1 - weight) * low.slowdown(n, k) + weight * high.slowdown(n, k)
        fastest: float = low.fastest ** (1 - weight) * high.fastest**weight
        ideal = self.roofline.gemm(m, _next_tile(n), _next_tile(k))
        return max(ideal * math.exp(slowdown), fastest)


@cache
def _excess(profile: GpuProfile, dtype: WeightsDtype) -> float:
    """How much longer GEMMs take that run for long, relative to the time of their FLOP.

    FLOP take power. So a GEMM that lies far above their time, because it is small or misaligned,
    loses a smaller part of its rate. If nothing was measured of a type, it is as in 16 bits.
    """
    times = [time for time in profile.sustained if time.dtype == dtype]
    if not times:
        return _excess(profile, "bf16") if dtype != "bf16" else 0.0
    excesses = [
        (time.microseconds - _gemm_times(profile, dtype).microseconds(time.m, time.n, time.k))
        / roofline(profile, dtype).multiplying(time.m, time.n, time.k)
        for time in times
    ]
    return max(0.0, statistics.mean(excesses))


@cache
def _gemm_times(profile: GpuProfile, dtype: WeightsDtype) -> _GemmTimes:
    return _GemmTimes(profile, dtype)


def _tiles_of(sweep: LinearSweep) -> set[int]:
    return {dim for dim in sweep.dims if dim % _TILE == 0}


def _suffice(sweeps: Sequence[LinearSweep]) -> bool:
    """Whether sweeps at one m are over both axes, and those over n have common dims."""
    over_n = [_tiles_of(sweep) for sweep in sweeps if sweep.axis == "n"]
    return bool(over_n) and len(over_n) < len(sweeps) and bool(set.intersection(*over_n))


def _surface(ceilings: Roofline, m: int, sweeps: Sequence[LinearSweep]) -> _Surface:
    """The surface of the sweeps at `m`. The longest sweep over each axis is its fine line."""
    longest = {
        axis: max((s for s in sweeps if s.axis == axis), key=lambda s: len(s.dims))
        for axis in get_args(Axis)
    }
    lines: dict[Axis, _Line] = {axis: _line(ceilings, s) for axis, s in longest.items()}
    over_n = {s.fixed: _line(ceilings, s).tiles for s in sweeps if s.axis == "n"}
    coarse = set.intersection(*(set(curve[0]) for curve in over_n.values()))
    rows = {
        math.log(k): _curve((x, y) for x, y in zip(*over_n[k], strict=True) if x in coarse)
        for k in sorted(over_n)
    }
    at_n = math.log(longest["k"].fixed)  # of the fine line over k
    column = tuple(rows), tuple(interpolate(*curve, at_n) for curve in rows.values())
    corrections: dict[Axis, Curve] = {
        "n": _minus(lines["n"].tiles, rows[math.log(longest["n"].fixed)]),
        "k": _minus(lines["k"].tiles, column),
    }
    return _Surface(
        m=m,
        rows=(tuple(rows), tuple(rows.values())),
        lines=lines,
        corrections=corrections,
        min_slowdown=min(min(curve[1]) for curve in (*over_n.values(), lines["k"].tiles)),
        fastest=min(min(s.microseconds) for s in sweeps),
    )


def _line(ceilings: Roofline, sweep: LinearSweep) -> _Line:
    def ideal(dim: int) -> float:
        n, k = (dim, sweep.fixed) if sweep.axis == "n" else (sweep.fixed, dim)
        return ceilings.gemm(sweep.m, n, k)

    times = dict(zip(sweep.dims, sweep.microseconds, strict=True))
    tiles = _curve((math.log(dim), math.log(times[dim] / ideal(dim))) for dim in _tiles_of(sweep))
    extra: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for dim, time in times.items():
        if dim % _TILE:
            at = math.log(_next_tile(dim))
            on_tile = ideal(_next_tile(dim)) * math.exp(interpolate(*tiles, at))
            extra[_alignment(dim)].append((at, math.log(time / on_tile)))
    return _Line(tiles, {alignment: _curve(costs) for alignment, costs in extra.items()})


def _minus(line: Curve, smooth: Curve) -> Curve:
    return line[0], tuple(y - interpolate(*smooth, x) for x, y in zip(*line, strict=True))


def _curve(points: Iterable[tuple[float, float]]) -> Curve:
    """The points in ascending order; points with the same x become their mean."""
    by_x: dict[float, list[float]] = defaultdict(list)
    for x, y in points:
        by_x[x].append(y)
    xs = sorted(by_x)
    return tuple(xs), tuple(sum(by_x[x]) / len(by_x[x]) for x in xs)


def _alignment(dim: int) -> int:
    """The largest power of two that divides `dim`."""
    return dim & -dim


def _next_tile(dim: int) -> int:
    return round_up(dim, _TILE)

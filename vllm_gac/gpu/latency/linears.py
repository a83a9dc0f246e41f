"""Predicted time of linear layers that share one input, whole or of low rank.

Whole linear layers are one GEMM. The two factors of a low-rank linear are GEMMs, too. But a server
runs some of them by our own kernels if there are few tokens: factors by kernels/skinny_gemm/, which
computes several at once, and whole gate and up with SwiGLU by kernels/swiglu.py. Their times follow
a law that is fitted to what a profile has measured of linear layers as served (`LaunchTimes`). Of
low-rank linear layers, what cuBLAS computes is subtracted before.

In FP8, vLLM's kernels multiply: each factor is a GEMM whose input is quantized before. Of whole
linear layers, a kernel of ours does it that computes the input, too (kernels/fp8_rows.py). In W4A16
they multiply, too, and nothing is quantized.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

from vllm_gac.gpu.latency.gemm import gemm_microseconds, moving_microseconds, roofline
from vllm_gac.gpu.latency.interpolation import interpolate
from vllm_gac.gpu.latency.passes import pass_microseconds
from vllm_gac.gpu.profile import GpuProfile, LowRankTime, WeightsDtype
from vllm_gac.kernels.gpu_limits import takes_fp8_rows, takes_swiglu
from vllm_gac.kernels.skinny_gemm.tiling import faster_than_cublas
from vllm_gac.layout.rounding import GRANULE

# Of two columns of the fit: the squared sine of the angle below which they tell the same.
_PARALLEL = 0.01


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear [out_size, in_size], as two factors if it has a rank. Its up factor has the bias."""

    out_size: int
    in_size: int
    rank: int | None = None
    has_bias: bool = False

    @property
    def matrices(self) -> list[tuple[int, int]]:
        """[features, width] of what multiplies."""
        if self.rank is None:
            return [(self.out_size, self.in_size)]
        return [(self.rank, self.in_size), (self.out_size, self.rank)]


def take_quantized(linears: Sequence[Linear]) -> bool:
    """Whether the kernel before linear layers in FP8 quantizes their input.

    serving/model/fp8_linear.py decides it by the same rule.
    """
    together, splits_input = sum(linear.out_size for linear in linears), len(linears) == 1
    has_rank = any(linear.rank is not None for linear in linears)
    plain = not has_rank and not (splits_input and linears[0].has_bias)
    return plain and takes_fp8_rows(linears[0].in_size, together)


def linears_microseconds(
    tokens: int,
    linears: Sequence[Linear],
    profile: GpuProfile,
    *,
    is_gated: bool = False,
    is_sustained: bool = False,
    dtype: WeightsDtype = "bf16",
    is_quantized: bool = False,
    is_stock: bool = False,
) -> float:
    """Microseconds of linear layers of one input as served, with SwiGLU if they are gate and up.

    Raises ProfileError if the profile has no GEMM times.

    Args:
        tokens: rows of the input.
        linears: the linears; all have the same `in_size`.
        profile: the GPU.
        is_gated: whether they are gate and up, with SwiGLU on top.
        is_sustained: whether GEMMs run for long without a rest, as in prefill under load.
        dtype: of weights; in FP8, with the quantization of every input.
        is_quantized: whether the kernel before has quantized the input in FP8, and is counted.
        is_stock: whether vLLM serves its own model, without kernels of ours.
    """
    if dtype != "bf16":
        return _by_vllm(
            tokens, tuple(linears), profile, is_gated, is_sustained, is_quantized, dtype
        )
    return _in_16_bits(tokens, tuple(linears), profile, is_gated, is_sustained, is_stock)


# A planner asks for the same linear layers with each choice of other dims, and each set of methods.
@lru_cache(maxsize=1 << 18)
def _in_16_bits(
    tokens: int,
    linears: Sequence[Linear],
    profile: GpuProfile,
    is_gated: bool,
    is_sustained: bool,
    is_stock: bool,
) -> float:
    """Microseconds of linear layers in 16 bits, by cuBLAS or by our kernels."""
    swiglu = roofline(profile).moving(3 * tokens * linears[0].out_size) if is_gated else 0.0
    kernel, time = _kernel_times(profile), 0.0
    if all(linear.rank is None for linear in linears):
        by_kernel = kernel.gated(linears, tokens) if is_gated and not is_stock else None
        if by_kernel is not None:
            return by_kernel
        out_size = sum(linear.out_size for linear in linears)
        in_size = linears[0].in_size
        gemm = gemm_microseconds(tokens, out_size, in_size, profile, is_sustained=is_sustained)
        return gemm + swiglu
    for launch in _launches(linears, is_gated):
        if kernel.computes(launch, tokens):
            time += kernel.microseconds(launch, tokens)
            if launch.is_gated:
                swiglu = 0.0
        else:
            time += launch.by_cublas(tokens, profile, is_sustained)
    return time + swiglu


@lru_cache(maxsize=1 << 18)
def _by_vllm(
    tokens: int,
    linears: Sequence[Linear],
    profile: GpuProfile,
    is_gated: bool,
    is_sustained: bool,
    is_quantized: bool,
    dtype: WeightsDtype,
) -> float:
    """Microseconds of quantized linear layers: whole ones are one GEMM, factors one each."""
    is_dense = all(linear.rank is None for linear in linears)
    shapes = [(sum(linear.out_size for linear in linears), linears[0].in_size)]
    if not is_dense:
        shapes = [shape for linear in linears for shape in linear.matrices]
    time = sum(
        gemm_microseconds(tokens, n, k, profile, is_sustained=is_sustained, dtype=dtype)
        for n, k in shapes
    )
    if dtype == "fp8" and not is_quantized:
        time += sum(pass_microseconds("quantize", tokens, k, profile) for _, k in shapes)
    if is_gated:
        width = linears[0].out_size
        if dtype == "fp8":
            time += pass_microseconds("swiglu", tokens, width, profile)
        else:  # which GPUs without FP8 have no times of
            time += moving_microseconds(3 * tokens * width, profile)
        if not is_dense:  # vLLM's SwiGLU takes gate and up beside each other
            time += moving_microseconds(4 * tokens * width, profile)
    return time


@dataclass(frozen=True, slots=True)
class _Launch:
    """Matrices [features, width], each with columns of its own of one input; may be one launch."""

    features: tuple[int, ...]  # outputs of each
    widths: tuple[int, ...]  # inputs of each
    is_gated: bool = False  # whether they are gate and up, and their launch computes SwiGLU, too
    is_plain: bool = True  # whether they are factors that only multiply; our kernel takes no others

    def by_cublas(self, tokens: int, profile: GpuProfile, is_sustained: bool = False) -> float:
        """Microseconds of a GEMM for each, without SwiGLU."""
        return sum(
            gemm_microseconds(tokens, n, k, profile, is_sustained=is_sustained)
            for n, k in self._shapes()
        )

    def roofline(self, tokens: int, profile: GpuProfile) -> float:
        """Least possible microseconds."""
        return sum(roofline(profile).gemm(tokens, n, k) for n, k in self._shapes())

    def _shapes(self) -> Iterator[tuple[int, int]]:
        return zip(self.features, self.widths, strict=True)


def _launches(linears: Sequence[Linear], is_gated: bool) -> Iterator[_Launch]:
    """What computes linear layers of which at least one has low rank (serving/model/linear.py).

    The down factors of several are one matrix if their ranks are aligned, and their up factors are
    computed at once, if that is faster.
    """
    low = [(linear, linear.rank) for linear in linears if linear.rank is not None]
    fused = len(low) > 1 and all(rank % GRANULE == 0 for _, rank in low)
    for group in [low] if fused else [[pair] for pair in low]:
        ranks = tuple(rank for _, rank in group)
        yield _Launch((sum(ranks),), (group[0][0].in_size,))
        outs = tuple(linear.out_size for linear, _ in group)
        is_plain = not any(linear.has_bias for linear, _ in group)
        yield _Launch(outs, ranks, is_gated and fused, is_plain)
    for linear in linears:
        if linear.rank is None:
            yield _Launch((linear.out_size,), (linear.in_size,), is_plain=False)


@dataclass(frozen=True, slots=True)
class MeasuredLaunches:
    """Launches of a kernel in one measurement: how many, and their times together.

    All but `launches` are in microseconds: the roofline's time, the one that was measured, and the
    one of the whole measurement, other kernels included.
    """

    launches: int
    roofline: float
    time: float
    whole: float


class LaunchTimes:
    """The law of one kernel on one GPU, by what was measured at each number of tokens.

    A launch takes an overhead, and the roofline's time of what it computes, times a slowdown.
    """

    def __init__(self, measured: Mapping[int, Sequence[MeasuredLaunches]]) -> None:
        self.log_tokens = [math.log(tokens) for tokens in sorted(measured)]
        self.overheads: list[float] = []
        self.slowdowns: list[float] = []
        overhead = 0.0
        for tokens in sorted(measured):
            overhead, slowdown = _fit(measured[tokens], overhead)
            self.overheads.append(overhead)
            self.slowdowns.append(slowdown)

    def __bool__(self) -> bool:
        """Whether anything was measured."""
        return bool(self.log_tokens)

    def microseconds(self, tokens: int, roofline: float) -> float:
        """Time of a launch for which the roofline allows `roofline` microseconds.

        Between measured numbers of tokens, overhead and slowdown are interpolated over logs.
        """
        overhead, slowdown = (
            interpolate(self.log_tokens, values, math.log(tokens))
            for values in (self.overheads, self.slowdowns)
        )
        return overhead + slowdown * roofline


def _fit(measured: Sequence[MeasuredLaunches], known: float) -> tuple[float, float]:
    """The overhead of a launch and its slowdown, by least squares of relative errors.

    If `measured` does not tell them apart, or one would be negative, the overhead is `known`, and
    no launch is faster than the roofline.
    """
    rows = [(m.launches / m.whole, m.roofline / m.whole, m.time / m.whole) for m in measured]
    aa, bb = sum(a * a for a, _, _ in rows), sum(b * b for _, b, _ in rows)
    ab = sum(a * b for a, b, _ in rows)
    ay, by = sum(a * y for a, _, y in rows), sum(b * y for _, b, y in rows)
    if (determinant := aa * bb - ab * ab) > _PARALLEL * aa * bb:
        overhead = (ay * bb - by * ab) / determinant
        slowdown = (by * aa - ay * ab) / determinant
        if min(overhead, slowdown) >= 0:
            return overhead, slowdown
    return known, max(1.0, (by - known * ab) / bb)


class _KernelTimes:
    """Times of our two kernels for few tokens, computed once per profile."""

    def __init__(self, profile: GpuProfile) -> None:
        self.profile = profile
        low_rank: dict[int, list[MeasuredLaunches]] = defaultdict(list)
        for entry in profile.low_rank:
            if (launches := self._measured(entry)).launches:
                low_rank[entry.tokens].append(launches)
        self.factors = LaunchTimes(low_rank)
        swiglu: dict[int, list[MeasuredLaunches]] = defaultdict(list)
        for time in profile.swiglu:
            ideal = roofline(profile).gemm(time.tokens, 2 * time.features, time.width)
            measured = MeasuredLaunches(1, ideal, time.microseconds, time.microseconds)
            swiglu[time.tokens].append(measured)
        self.gate_up = LaunchTimes(swiglu)

    def computes(self, launch: _Launch, tokens: int) -> bool:
        """Whether a server runs `launch` by our kernel; never if the profile has no times of it."""
        return bool(self.factors) and _is_ours(launch, tokens)

    def microseconds(self, launch: _Launch, tokens: int) -> float:
        """Time of a launch that our kernel computes."""
        return self.factors.microseconds(tokens, launch.roofline(tokens, self.profile))

    def gated(self, linears: Sequence[Linear], tokens: int) -> float | None:
        """Time of whole gate and up with SwiGLU by our kernel; None if a server does not use it."""
        features, width = linears[0].out_size, linears[0].in_size
        plain = not any(linear.has_bias for linear in linears)
        if not (self.gate_up and plain and takes_swiglu(tokens, features, width)):
            return None
        ideal = roofline(self.profile).gemm(tokens, 2 * features, width)
        return self.gate_up.microseconds(tokens, ideal)

    def _measured(self, entry: LowRankTime) -> MeasuredLaunches:
        """What our kernel did in a measurement."""
        tokens, profile = entry.tokens, self.profile
        linears = [
            Linear(out, entry.in_size, rank)
            for out, rank in zip(entry.out_sizes, entry.ranks, strict=True)
        ]
        launches = list(_launches(linears, entry.is_gated))
        ours = [launch for launch in launches if _is_ours(launch, tokens)]
        others = [launch for launch in launches if not _is_ours(launch, tokens)]
        rest = sum(launch.by_cublas(tokens, profile) for launch in others)
        if entry.is_gated and not any(launch.is_gated for launch in ours):
            rest += roofline(profile).moving(3 * tokens * entry.out_sizes[0])
        return MeasuredLaunches(
            len(ours),
            sum(launch.roofline(tokens, profile) for launch in ours),
            entry.microseconds - rest,
            entry.microseconds,
        )


@cache
def _kernel_times(profile: GpuProfile) -> _KernelTimes:
    return _KernelTimes(profile)


def _is_ours(launch: _Launch, tokens: int) -> bool:
    """Whether our kernel accepts `launch` and is faster than cuBLAS, as the server decides."""
    return (
        launch.is_plain
        and all(width % GRANULE == 0 for width in launch.widths)
        and faster_than_cublas(tokens, launch.features, launch.widths, launch.is_gated) is not None
    )

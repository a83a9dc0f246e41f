"""Sweeps of y[m, n] = x[m, k] w over n and over k, in bf16, FP8 and W4A16."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from vllm_gac.gpu.profile import W4A16_GROUP, LinearSweep, SustainedTime, WeightsDtype
from vllm_gac.layout.rounding import ceil_div, round_up
from vllm_gac.profiling.stock_kernels import fp8_multiply, w4a16_multiply
from vllm_gac.profiling.timing import (
    MORE_THAN_L2,
    microseconds,
    random_tensor,
    sustained_microseconds,
)

FIXED = 4096  # the other dim of a sweep, except for coarse ones

# For gpu/latency/gemm.py: multiples of 64 up to the widths of MLPs, every alignment class at some
# of them, and a coarse grid of both dims.
_BATCHES = (1, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
_TILES = {
    "n": (
        *range(64, 1024, 64),
        *range(1024, 4096, 128),
        *range(4096, 12288, 256),
        *range(12288, 28673, 512),
    ),
    "k": (*range(64, 1024, 64), *range(1024, 4096, 256), *range(4096, 28673, 1024)),
}
_CLASS_AT = (192, 576, 1088, 4160, 12352)
_CLASSES = (1, 2, 4, 8, 16, 32)
_COARSE = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 14336, 28672)

# Quantized, the most telling batches first, and the dims that vLLM's kernels take without padding.
_QUANTIZED_BATCHES = (64, 1, 2048, 16, 256, 128, 8192, 512)
_FP8_CLASSES = (16, 32)
_QUANTIZED_COARSE = (64, 256, 1024, 2048, 4096, 14336, 28672)
# For the rate that GEMMs hold for long: [n, k] of Llama-3-8B's linear layers, in chunks of prompts.
SUSTAINED_SHAPES = ((28672, 4096), (4096, 14336), (6144, 4096), (4096, 4096))
_SUSTAINED_BATCH = 8192
_LONG = 1024  # from here on, one call is long enough to be timed alone


@dataclass(frozen=True, slots=True)
class GemmPlan:
    """One sweep to be measured."""

    axis: Literal["n", "k"]
    m: int
    dims: tuple[int, ...]
    fixed: int = FIXED
    dtype: WeightsDtype = "bf16"


def linear_plans(dtype: WeightsDtype = "bf16") -> list[GemmPlan]:
    """Sweeps from which the time of any GEMM is predicted."""
    is_16_bit = dtype == "bf16"
    batches, coarse = (_BATCHES, _COARSE) if is_16_bit else (_QUANTIZED_BATCHES, _QUANTIZED_COARSE)
    classes = _CLASSES if is_16_bit else _FP8_CLASSES
    off = {at - step for at in _CLASS_AT for step in (0, *classes)}
    first, every = {"bf16": (0, 1), "fp8": (0, 2), "w4a16": (1, 2)}[dtype]
    tiles = {axis: dims[first::every] for axis, dims in _TILES.items()}
    if dtype == "w4a16":  # whole groups, which are no dims that Marlin pads
        off, coarse = set(), (W4A16_GROUP, *coarse[1:])
    plans = []
    for m in batches:
        plans += [GemmPlan("n", m, coarse, fixed=k) for k in coarse if k != FIXED]
        plans.append(GemmPlan("n", m, tuple(sorted({*off, *tiles["n"], *coarse}))))
        plans.append(GemmPlan("k", m, tuple(sorted({*off, *tiles["k"], *coarse}))))
    return [replace(plan, dtype=dtype) for plan in plans]


class Gemms:
    """Times GEMMs on random numbers of one type, in buffers that are allocated once."""

    def __init__(self, plans: Sequence[GemmPlan]) -> None:
        widest = max(plan.dims[-1] for plan in plans)
        largest = max(plan.dims[-1] * plan.fixed for plan in plans)
        tallest = max(plan.m for plan in plans)
        (self.dtype,) = {plan.dtype for plan in plans}
        number = torch.float8_e4m3fn if self.dtype == "fp8" else torch.bfloat16
        if self.dtype != "w4a16":  # whose kernels have their own order of weights
            self.weights = random_tensor(MORE_THAN_L2 // number.itemsize + largest).to(number)
        self.inputs = random_tensor(tallest * max(widest, FIXED)).to(number)
        self.outputs = torch.empty_like(self.inputs)

    def measure(self, m: int, n: int, k: int) -> float:
        """Microseconds of x[m, k] @ w[n, k].T, as in torch's linear."""
        call, copies = self._call(m, n, k)
        return microseconds(call, max(copies, 4) if m < _LONG else copies, replays=5)

    def sustain(self, m: int, n: int, k: int, seconds: float) -> float:
        """The same after it ran for about half of `seconds`, without a rest."""
        return sustained_microseconds(*self._call(m, n, k), seconds)

    def _call(self, m: int, n: int, k: int) -> tuple[Callable[[], object], int]:
        """A function that multiplies by the next of several copies of w, and their number."""
        x = self.inputs[: m * k].view(m, k)
        if self.dtype == "w4a16":
            copies = min(256, ceil_div(2 * MORE_THAN_L2, n * k))
            with x.device:
                by_next = w4a16_multiply(n, k, copies)
            return lambda: by_next(x), copies
        size = round_up(n * k, 64)  # each weight begins at a cache line
        copies = min(256, ceil_div(MORE_THAN_L2, self.weights.itemsize * size))
        weights = [self.weights[i * size :][: n * k].view(n, k).t() for i in range(copies)]
        turn = itertools.cycle(weights)
        if self.dtype == "bf16":
            y = self.outputs[: m * n].view(m, n)
            return lambda: torch.mm(x, next(turn), out=y), copies
        multiply = fp8_multiply(x)
        return lambda: multiply(next(turn)), copies

    def sweep(self, plan: GemmPlan, tick: Callable[[], object]) -> dict[str, Any]:
        """The fields of `plan`'s LinearSweep but its type. `tick` is called after each dim."""
        times = []
        for dim in plan.dims:
            n, k = (dim, plan.fixed) if plan.axis == "n" else (plan.fixed, dim)
            times.append(round(self.measure(plan.m, n, k), 2))
            tick()
        shape = {"axis": plan.axis, "m": plan.m, "fixed": plan.fixed}
        return shape | {"dims": list(plan.dims), "microseconds": times}


def measure_linears(plans: Sequence[GemmPlan], tick: Callable[[], object]) -> list[LinearSweep]:
    """The sweeps of `linear_plans` of one type. `tick` is called after each dim."""
    gemms = Gemms(plans)
    return [LinearSweep(dtype=plan.dtype, **gemms.sweep(plan, tick)) for plan in plans]


def measure_sustained(tick: Callable[[], object], dtype: WeightsDtype) -> list[SustainedTime]:
    """Times of SUSTAINED_SHAPES that run for a second each; `tick` is called after each.

    They leave the GPU warm, at its power limit: measure everything else before.
    """
    m = _SUSTAINED_BATCH
    gemms = Gemms([GemmPlan("n", m, (n,), fixed=k, dtype=dtype) for n, k in SUSTAINED_SHAPES])
    times = []
    for n, k in SUSTAINED_SHAPES:
        time = round(gemms.sustain(m, n, k, 1.0), 2)
        times.append(SustainedTime(m=m, n=n, k=k, seconds=1.0, microseconds=time, dtype=dtype))
        tick()
    return times

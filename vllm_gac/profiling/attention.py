"""Sweeps of torch's attention over head sizes."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn.functional import scaled_dot_product_attention

from vllm_gac.gpu.profile import AttentionSweep
from vllm_gac.profiling.timing import microseconds

_HEADS = 32


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """One sweep to be measured."""

    batch: int
    length: int
    causal: bool
    dtype: torch.dtype
    dims: tuple[int, ...]


def dim_plan(quick: bool) -> AttentionPlan:
    """The sweep that shows which head sizes are fast: every size from 64 to 160."""
    return AttentionPlan(4, 2048, False, torch.float16, tuple(range(64, 161, 8 if quick else 1)))


def causal_plans(quick: bool) -> list[AttentionPlan]:
    """Sweeps over prefill chunks of several lengths, for machines without vLLM's kernels."""
    sizes = tuple(range(32, 257, 32 if quick else 16))
    return [
        AttentionPlan(1, length, True, torch.bfloat16, sizes) for length in (256, 1024, 2048, 8192)
    ]


def attention_sweep(plan: AttentionPlan, tick: Callable[[], object]) -> AttentionSweep:
    """Measure `plan`. `tick` is called after each head size."""
    times = []
    for dim in plan.dims:
        shape = (3, plan.batch, _HEADS, plan.length, dim)
        q, k, v = _random(shape, plan.dtype)
        call = partial(scaled_dot_product_attention, q, k, v, is_causal=plan.causal)
        times.append(microseconds(call))
        tick()
    return AttentionSweep(
        kernel="torch scaled_dot_product_attention",
        batch=plan.batch,
        length=plan.length,
        heads=_HEADS,
        causal=plan.causal,
        dims=list(plan.dims),
        microseconds=[round(time, 1) for time in times],
    )


def _random(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Normally distributed numbers on the GPU."""
    return torch.empty(shape, dtype=dtype, device="cuda").normal_()

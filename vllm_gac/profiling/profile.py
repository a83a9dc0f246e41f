"""All measurements of `vllm-gac profile`, in their order."""

from collections.abc import Sequence
from datetime import date
from typing import Any

import torch
import triton
from tqdm import tqdm

from vllm_gac.errors import ProfileError
from vllm_gac.gpu.profile import Ceilings, GemmSweep, GpuProfile, LinearSweep
from vllm_gac.layout.names import VERSION
from vllm_gac.profiling.attention import attention_sweep, causal_plans, dim_plan
from vllm_gac.profiling.decode import (
    compile_kernels,
    decode_plans,
    kernels_of,
    measure_decode,
    measure_stock_decode,
    stock_plans,
)
from vllm_gac.profiling.gemms import (
    GemmPlan,
    Gemms,
    dim_plans,
    dim_sweep,
    linear_plans,
    linear_sweep,
    measure_sustained,
    sustained_shapes,
)
from vllm_gac.profiling.low_rank import low_rank_shapes, low_rank_tokens, measure_low_rank
from vllm_gac.profiling.prefill import measure_prefill, prefill_plans
from vllm_gac.profiling.swiglu import measure_swiglu, swiglu_shapes
from vllm_gac.profiling.timing import copy_bandwidth, warm_up

_PEAK = 8192  # of a square GEMM
# Runs of the same kernel an hour apart differ by this much on an otherwise idle H200.
_NOISE = 0.02
_METHOD = (
    "medians of CUDA graph replays, weights and caches rotated past L2, the GPU at rest as long as "
    "it is busy (sustained times: means, without a rest); torch.mm and low-rank linears as served "
    "in bfloat16, scaled_dot_product_attention in float16 (all pairs) and bfloat16 (causal), "
    "decode and prefill kernels in bfloat16"
)


def measure_profile(*, quick: bool = False, progress: bool = True) -> GpuProfile:
    """Measure the first CUDA GPU that PyTorch sees. Nothing else should run on it meanwhile.

    Args:
        quick: measure fewer points: one minute instead of several.
        progress: show a progress bar.

    Raises:
        ProfileError: if the GPU has too little free memory.
    """
    try:
        return _measure(quick, progress)
    except torch.OutOfMemoryError as e:
        free, total = (memory / 2**30 for memory in torch.cuda.mem_get_info())
        raise ProfileError(
            f"{torch.cuda.get_device_name()}: {free:.1f} of {total:.1f} GiB of memory are free, "
            "too little to measure; stop what else runs on it"
        ) from e


def _measure(quick: bool, progress: bool) -> GpuProfile:
    by_dim, linear = dim_plans(quick), linear_plans(quick)
    heads, causal = dim_plan(quick), causal_plans(quick)
    sustained = sustained_shapes(quick)
    decode, prefill = decode_plans(quick), prefill_plans(quick)
    kernels, stock = kernels_of(decode), stock_plans(decode)
    factored, gated = low_rank_shapes(quick), swiglu_shapes(quick)
    gemms = sum(len(plan.dims) for plan in by_dim + linear)
    sizes = sum(len(plan.dims) for plan in [heads, *causal])
    steps = len(kernels) + gemms + len(factored) + len(gated) + sizes
    steps += len(decode) + len(stock) + len(prefill) + len(sustained)
    with tqdm(total=steps, disable=not progress, unit="kernel") as bar:
        bar.set_description("compiling decode kernels")
        compile_kernels(kernels, bar.update)
        bar.set_description("copy bandwidth")
        warm_up()
        bandwidth = copy_bandwidth()
        bar.set_description("linears")
        peak, gemm, linears = _gemms(by_dim, linear, bar)
        bar.set_description("low-rank linears")
        low_rank = measure_low_rank(factored, low_rank_tokens(quick), bar.update)
        bar.set_description("gate, up and SwiGLU")
        swiglu = measure_swiglu(gated, bar.update)
        bar.set_description("attention by head size")
        attention = attention_sweep(heads, bar.update)
        causals = [attention_sweep(plan, bar.update) for plan in causal]
        bar.set_description("decode attention")
        decoded = measure_decode(decode, bar.update)
        decoded += measure_stock_decode(stock, bar.update)
        bar.set_description("prefill attention")
        prefilled = measure_prefill(prefill, bar.update)
        bar.set_description("linears without a rest")
        held = measure_sustained(sustained, bar.update)
    return GpuProfile(
        version=1,
        gpu=torch.cuda.get_device_name(),
        measured=date.today().isoformat(),
        software={
            "vllm-gac": VERSION,
            "torch": str(torch.__version__),
            "triton": str(triton.__version__),
        },
        method=_METHOD,
        noise=_NOISE,
        attention=[attention],
        gemm=gemm,
        ceilings=Ceilings(terabytes_per_second=round(bandwidth, 3), teraflops=round(peak, 1)),
        linear=linears,
        low_rank=low_rank,
        swiglu=swiglu,
        sustained=held,
        decode=decoded,
        prefill=causals,
        prefill_kernels=prefilled,
    )


def _gemms(
    by_dim: Sequence[GemmPlan], linear: Sequence[GemmPlan], bar: "tqdm[Any]"
) -> tuple[float, list[GemmSweep], list[LinearSweep]]:
    """TFLOP/s of the fastest GEMM, and both kinds of sweeps."""
    buffers = Gemms([*by_dim, *linear])
    rates = [2 * _PEAK**3 / buffers.measure(_PEAK, _PEAK, _PEAK)]
    swept = [dim_sweep(plan, buffers.sweep(plan, bar.update)) for plan in by_dim]
    linears = [linear_sweep(plan, buffers.sweep(plan, bar.update)) for plan in linear]
    for found in linears:
        flops = 2 * found.m * found.fixed
        rates += [
            flops * dim / time for dim, time in zip(found.dims, found.microseconds, strict=True)
        ]
    return max(rates) / 1e6, swept, linears

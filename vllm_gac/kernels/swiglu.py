"""The gate and up projections of a few tokens and SwiGLU, in one kernel.

A GEMM of a few tokens takes little longer than reading its weights. Here a program reads the
weights of a few features from both projections, and has gate and up side by side in registers, so
SwiGLU costs nothing. In a kernel of its own, SwiGLU takes 3 to 13 us, depending on the MLP's width.
"""

# ruff: noqa: N803 -- Triton's convention: compile-time constants in capitals.
import functools

import torch
import triton
import triton.language as tl

from vllm_gac.kernels.gpu_limits import is_hopper, takes_swiglu

_MANY_FEATURES = 16384

_STEP = 128  # elements of a row that are read at a time


def is_faster(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether `swiglu_linear` accepts x and weight, and is faster on this GPU than two kernels."""
    return (
        x.dim() == 2
        and takes_swiglu(x.shape[0], weight.shape[0] // 2, weight.shape[1])
        and x.is_contiguous()
        and weight.is_contiguous()
        and x.dtype == weight.dtype
        and x.dtype in (torch.bfloat16, torch.float16)
        and x.device == weight.device
        and is_hopper(x.device)
    )


def swiglu_linear(
    x: torch.Tensor, weight: torch.Tensor, *, only_compile: bool = False
) -> torch.Tensor:
    """silu(x gate^T) * (x up^T), summed in fp32 and rounded once, at the end.

    Args:
        x: [tokens, width], contiguous; the width is a multiple of 8.
        weight: [2 * features, width], contiguous: gate above up.
        only_compile: compile the kernel for these arguments, but launch nothing. Of the sizes, it
            only matters whether there are more than 16 tokens, and _MANY_FEATURES or more.

    Returns:
        [tokens, features]; with `only_compile` its elements are undefined.
    """
    (tokens, width), features = x.shape, weight.shape[0] // 2
    out = torch.empty(tokens, features, dtype=x.dtype, device=x.device)
    tile = 64 if features >= _MANY_FEATURES else 32
    grid = (triton.cdiv(features, tile),)
    run = functools.partial(_swiglu.warmup, grid=grid) if only_compile else _swiglu[grid]
    run(
        x,
        weight,
        out,
        tokens,
        features,
        # The width is passed in eights: the compiler then knows that rows are aligned, and loads
        # 16 bytes at a time.
        width // 8,
        ROWS=max(16, triton.next_power_of_2(tokens)),
        FEATURES=tile,
        STEP=_STEP,
        num_warps=2,
        num_stages=3,
    )
    return out


@triton.jit(do_not_specialize=["tokens", "features", "k_div8"])
def _swiglu(
    x,
    weight,
    out,
    tokens,
    features,
    k_div8,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
    STEP: tl.constexpr,
):
    """One program computes FEATURES features of all tokens."""
    width = k_div8 * 8
    feature = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)
    # Lanes past the last feature compute that one again, and do not store it.
    gate_row = weight + tl.minimum(feature, features - 1).to(tl.int64)[:, None] * width
    up_row = gate_row + features.to(tl.int64) * width
    row = tl.arange(0, ROWS)[:, None]
    gate = tl.zeros([ROWS, FEATURES], tl.float32)
    up = tl.zeros([ROWS, FEATURES], tl.float32)
    for start in range(0, width, STEP):
        column = start + tl.arange(0, STEP)[None, :]
        inside = column < width
        part = tl.load(x + row * width + column, mask=(row < tokens) & inside, other=0.0)
        gates = tl.load(gate_row + column, mask=inside, other=0.0)
        gate = tl.dot(part, tl.trans(gates), gate)
        ups = tl.load(up_row + column, mask=inside, other=0.0)
        up = tl.dot(part, tl.trans(ups), up)
    result = gate / (1 + tl.exp(-gate)) * up
    mask = (row < tokens) & (feature < features)[None, :]
    tl.store(out + row * features + feature[None, :], result.to(out.dtype.element_ty), mask=mask)

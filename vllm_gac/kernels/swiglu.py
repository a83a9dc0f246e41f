"""The gate and up projections of a few tokens and SwiGLU, in one kernel.

Such a GEMM takes little longer than its weights take to read. A program reads what a few features
need of both projections and has gate and up side by side in registers, so SwiGLU costs nothing; a
kernel of its own takes 3 to 13 us, as the MLP is wide.
"""

# ruff: noqa: N803 -- Triton's convention: compile-time constants in capitals.
import functools

import torch
import triton
import triton.language as tl

# Where it takes less time than cuBLAS and vLLM's SwiGLU (benchmarks/results/swiglu_h200.md); of
# features, somewhere between 2880 and 5760.
MOST_TOKENS = 32
_LEAST_FEATURES = 4096
_MANY_FEATURES = 16384

_STEP = 128  # numbers of a row at a time


def is_faster(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether `swiglu_linear` takes these, and on this GPU less time than GEMM and activation."""
    return (
        x.dim() == 2
        and 0 < x.shape[0] <= MOST_TOKENS
        and x.is_contiguous()
        and weight.is_contiguous()
        and weight.shape[0] >= 2 * _LEAST_FEATURES
        and weight.shape[1] % 8 == 0
        and x.dtype == weight.dtype
        and x.dtype in (torch.bfloat16, torch.float16)
        and x.device == weight.device
        and is_hopper(x.device)
    )


@functools.cache
def is_hopper(device: torch.device) -> bool:
    """Whether the GPU is of the generation of the one on which it was measured."""
    is_nvidias = device.type == "cuda" and torch.version.hip is None
    return is_nvidias and torch.cuda.get_device_capability(device) == (9, 0)


def swiglu_linear(
    x: torch.Tensor, weight: torch.Tensor, *, only_compile: bool = False
) -> torch.Tensor:
    """silu(x gate^T) * (x up^T): [tokens, features].

    x [tokens, width]; weight [2 * features, width] is gate over up. Both contiguous, the width a
    multiple of 8. Sums are fp32, and rounded once, at the end. With `only_compile` nothing is
    launched, and of sizes only tokens above 16 and features above _MANY_FEATURES count.
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
        # In eights: so the compiler knows that rows are aligned, and loads 16 bytes at a time.
        width // 8,
        ROWS=max(16, triton.next_power_of_2(tokens)),
        FEATURES=tile,
        STEP=_STEP,
        num_warps=2,
        num_stages=3,
    )
    return out


@triton.jit(do_not_specialize=["tokens", "features", "eighths"])
def _swiglu(
    x,
    weight,
    out,
    tokens,
    features,
    eighths,
    ROWS: tl.constexpr,
    FEATURES: tl.constexpr,
    STEP: tl.constexpr,
):
    """One program: FEATURES features of all tokens."""
    width = eighths * 8
    feature = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)
    # Past the last feature that one is computed again, and not stored.
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

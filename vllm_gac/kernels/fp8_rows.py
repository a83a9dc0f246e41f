"""What is between FP8 linear layers, in one kernel with the quantization that follows.

A linear in FP8 takes numbers in e4m3 and one scale for each token. Its input is a row that a norm
or SwiGLU has just computed: quantizing it in the same program saves a launch, and a row is neither
written nor read in 16 bits. On Hopper, these kernels start while the linear before them ends.
"""

# ruff: noqa: N803 -- Triton's convention: compile-time constants in capitals.
import functools
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from vllm_gac.kernels.contiguous import require_contiguous
from vllm_gac.kernels.gpu_limits import HOPPER

FP8 = torch.float8_e4m3fn
_MAX_E4M3 = tl.constexpr(448.0)  # in e4m3
# Smaller scales are not used, as in vLLM's own kernel.
_MIN_SCALE = tl.constexpr(1 / (448.0 * 512))


def normed(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm of x + residual, quantized by token.

    Args:
        x: [tokens, width], contiguous.
        residual: the same, or None for zeros. It has the sum afterwards, rounded; the norm is of
            what was rounded.
        weight: [width], of the norm.
        eps: of the norm.

    Returns:
        e4m3 [tokens, width] and fp32 [tokens, 1]: numbers and the scale that they are to be
        multiplied by.
    """
    require_contiguous("fp8_rows", x, weight, *(() if residual is None else (residual,)))
    out, scales = _empty(x.shape[0], x.shape[1], x.device)
    has_sum = residual is not None
    held = residual if has_sum else x
    _run(_norm_rows, out, (x, held, weight, out, scales, x.shape[1], eps), ADD=has_sum)
    return out, scales


def gated(gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """silu(gate) * up, quantized by token, of contiguous `gate_up` [tokens, 2 * features].

    Returns what `normed` does, [tokens, features] and [tokens, 1].
    """
    require_contiguous("fp8_rows", gate_up)
    features = gate_up.shape[1] // 2
    out, scales = _empty(gate_up.shape[0], features, gate_up.device)
    _run(_gated_rows, out, (gate_up, out, scales, features))
    return out, scales


def quantized(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [tokens, width], contiguous, quantized by token; returns what `normed` does."""
    require_contiguous("fp8_rows", x)
    out, scales = _empty(x.shape[0], x.shape[1], x.device)
    _run(_quantized_rows, out, (x, out, scales, x.shape[1]))
    return out, scales


def _empty(tokens: int, width: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        torch.empty(tokens, width, dtype=FP8, device=device),
        torch.empty(tokens, 1, dtype=torch.float32, device=device),
    )


def _run(
    kernel: Any, out: torch.Tensor, arguments: tuple[object, ...], **constants: object
) -> None:
    """Launch one program a row of `out`."""
    tokens, width = out.shape
    if not tokens:
        return
    columns = triton.next_power_of_2(width)
    overlap = begins_early(out.device)
    kernel[(tokens,)](
        *arguments,
        COLUMNS=columns,
        OVERLAP=overlap,
        num_warps=min(16, max(1, columns // 256)),
        **constants,
        **({"launch_pdl": True} if overlap else {}),
    )


@functools.cache
def begins_early(device: torch.device) -> bool:
    """Whether a kernel may start before the one that it depends on has ended."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= HOPPER


@triton.jit
def _norm_rows(
    x,
    residual,
    weight,
    out,
    scales,
    width,
    eps,
    ADD: tl.constexpr,
    COLUMNS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program: a token."""
    if OVERLAP:
        gdc_launch_dependents()
    column = tl.arange(0, COLUMNS)
    inside = column < width
    at = tl.program_id(0).to(tl.int64) * width + column
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if OVERLAP:
        gdc_wait()  # until here, nothing was read or written that the launch before may write
    values = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        values += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        rounded = values.to(residual.dtype.element_ty)
        tl.store(residual + at, rounded, mask=inside)
        values = rounded.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(values * values, 0) / width + eps)
    _store(values * factor, inverse, out + at, scales, inside)


@triton.jit
def _gated_rows(gate_up, out, scales, features, COLUMNS: tl.constexpr, OVERLAP: tl.constexpr):
    """One program: a token."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    column = tl.arange(0, COLUMNS)
    inside = column < features
    at = tl.program_id(0).to(tl.int64) * features
    gate = tl.load(gate_up + 2 * at + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + 2 * at + features + column, mask=inside, other=0.0).to(tl.float32)
    _store(gate / (1 + tl.exp(-gate)) * up, 1.0, out + at + column, scales, inside)


@triton.jit
def _quantized_rows(x, out, scales, width, COLUMNS: tl.constexpr, OVERLAP: tl.constexpr):
    """One program: a token."""
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    column = tl.arange(0, COLUMNS)
    inside = column < width
    at = tl.program_id(0).to(tl.int64) * width + column
    values = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    _store(values, 1.0, out + at, scales, inside)


@triton.jit
def _store(values, common, target, scales, inside):
    """Store a row, [COLUMNS] elements that are to be multiplied by `common`, and its scale."""
    scale = tl.maximum(tl.max(tl.abs(values), 0) * common / _MAX_E4M3, _MIN_SCALE)
    tl.store(scales + tl.program_id(0), scale)
    # A quotient may be past the largest number by rounding, which the conversion does not expect.
    quotient = values * (common / scale)
    quotient = tl.minimum(tl.maximum(quotient, -_MAX_E4M3), _MAX_E4M3)
    tl.store(target, quotient.to(target.dtype.element_ty), mask=inside)

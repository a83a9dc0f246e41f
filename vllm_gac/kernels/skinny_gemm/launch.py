"""Launches linear layers of a few tokens, and says for which that is faster than cuBLAS."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton

from vllm_gac.kernels.gpu_limits import is_hopper
from vllm_gac.kernels.skinny_gemm.gemm import skinny_gemm
from vllm_gac.kernels.skinny_gemm.gemv import skinny_gemv
from vllm_gac.kernels.skinny_gemm.tiling import MAX_LINEARS, Tiling, faster_than_cublas


def faster_tiling(
    x: torch.Tensor, weights: Sequence[torch.Tensor], is_gated: bool
) -> Tiling | None:
    """How to launch these linear layers, if the kernel accepts them and is faster on this GPU."""
    accepted = (
        x.dim() == 2
        and x.shape[0] > 0
        and x.stride(1) == 1
        and x.stride(0) % 8 == 0
        and x.dtype in (torch.bfloat16, torch.float16)
        and len(weights) <= MAX_LINEARS
        and all(
            weight.dtype == x.dtype
            and weight.device == x.device
            and weight.is_contiguous()
            and weight.shape[1] % 8 == 0
            for weight in weights
        )
        and is_hopper(x.device)
    )
    if not accepted:
        return None
    features, widths = zip(*(weight.shape for weight in weights), strict=True)
    return faster_than_cublas(x.shape[0], features, widths, is_gated)


def linears(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    tiling: Tiling,
    counters: torch.Tensor,
    *,
    only_compile: bool = False,
) -> torch.Tensor:
    """Several linear layers, each of its own columns of x, written beside each other.

    Sums are in fp32 and rounded once, at the end.

    Args:
        x: [tokens, sum of the linear layers' inputs], the elements of a token contiguous.
        weights: [out, in] of each of at most MAX_LINEARS linear layers, contiguous. Every `in` is a
            multiple of 8.
        tiling: how programs share the work.
        counters: int32 zeros, at least `tiling.tiles(...)`; they are zeros again afterwards. No
            other launch may use them at the same time.
        only_compile: compile the kernel for these arguments, but launch nothing. No size matters
            then but the number of linear layers.

    Returns:
        [tokens, sum of the linear layers' outputs]; with `only_compile` its elements are undefined.
    """
    out = x.new_empty(x.shape[0], sum(weight.shape[0] for weight in weights))
    _launch(x, weights, out, tiling, counters, is_gated=False, only_compile=only_compile)
    return out


def gated_linears(
    x: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    tiling: Tiling,
    *,
    only_compile: bool = False,
) -> torch.Tensor:
    """silu(gate of its columns of x) * (up of its columns of x).

    Args:
        x: [tokens, the gate's inputs + the up's inputs], the elements of a token contiguous.
        gate: [features, in], contiguous; `in` is a multiple of 8.
        up: [features, in], likewise, with an `in` of its own.
        tiling: how programs share the work, without splits.
        only_compile: as in `linears`.

    Returns:
        [tokens, features]; with `only_compile` its elements are undefined.
    """
    out = x.new_empty(x.shape[0], gate.shape[0])
    _launch(x, (gate, up), out, tiling, x, is_gated=True, only_compile=only_compile)
    return out


def _launch(
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    out: torch.Tensor,
    tiling: Tiling,
    counters: torch.Tensor,
    *,
    is_gated: bool,
    only_compile: bool,
) -> None:
    tokens, count = x.shape[0], len(weights)
    padded = list(weights) + [weights[0]] * (MAX_LINEARS - count)
    # Strides and widths are passed in eights: the compiler then knows that rows are aligned, and
    # loads 16 bytes at a time.
    k_div8 = [weight.shape[1] // 8 for weight in padded]
    features = [weight.shape[0] for weight in padded]
    tiles = tiling.feature_tiles(features[: 1 if is_gated else count])
    constants = {
        "LINEARS": count,
        "GATED": is_gated,
        "FEATURES": tiling.features,
        "STEP": tiling.step,
        "EARLY": tiling.begins_early,
        "AHEAD": tiling.ahead if tiling.begins_early else 0,
        "STAGES": tiling.stages,
        "num_warps": tiling.warps,
    }
    if tiling.begins_early:
        constants["launch_pdl"] = True
    if tiling.rows == 1:
        run = _run(skinny_gemv, (tiles,), only_compile)
        run(x, *padded, out, *k_div8, *features, **constants)
        return
    blocks = triton.cdiv(tokens, tiling.rows)
    partial = out
    if tiling.splits > 1:
        elements = tiles * blocks * tiling.splits * tiling.features * tiling.rows
        partial = torch.empty(elements, dtype=torch.float32, device=x.device)
    run = _run(skinny_gemm, (tiles, tiling.splits, blocks), only_compile)
    run(
        x,
        *padded,
        out,
        partial,
        counters,
        tokens,
        x.stride(0) // 8,
        *k_div8,
        *features,
        out.shape[1],
        ROWS=tiling.rows,
        SPLITS=tiling.splits,
        **constants,
    )


def _run(kernel: Any, grid: tuple[int, ...], only_compile: bool) -> Callable[..., object]:
    return functools.partial(kernel.warmup, grid=grid) if only_compile else kernel[grid]

"""Compiles the linear layers of few tokens before the first request needs them."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from vllm_gac.kernels.on_all_cores import compiling_on_all_cores
from vllm_gac.kernels.skinny_gemm.launch import gated_linears, linears
from vllm_gac.kernels.skinny_gemm.tiling import MAX_TOKENS, Tiling, faster_than_cublas


@dataclass(frozen=True, slots=True)
class LaunchKind:
    """Linear layers that are one launch.

    features, widths: outputs and inputs of each. is_gated: whether they are gate and up, with
    SwiGLU on top.
    """

    features: tuple[int, ...]
    widths: tuple[int, ...]
    is_gated: bool
    dtype: torch.dtype

    def tilings(self, max_tokens: int) -> set[Tiling]:
        """Those of launches of 1..max_tokens tokens for which ours is faster than cuBLAS."""
        tilings = (
            faster_than_cublas(tokens, self.features, self.widths, self.is_gated)
            for tokens in range(1, min(max_tokens, MAX_TOKENS) + 1)
        )
        return {tiling for tiling in tilings if tiling is not None}


def warmup(kinds: Iterable[LaunchKind], max_tokens: int, device: torch.device) -> int:
    """Compile what launches of 1..max_tokens tokens of each of `kinds` run; return how many.

    Many kinds share their kernels, because a kernel does not depend on the sizes of the linear
    layers.
    """
    needed = {
        (len(kind.features), kind.is_gated, kind.dtype, tiling)
        for kind in kinds
        for tiling in kind.tilings(max_tokens)
    }
    with compiling_on_all_cores():
        for linears_at_once, is_gated, dtype, tiling in needed:
            _compile(linears_at_once, is_gated, dtype, tiling, device)
    return len(needed)


def _compile(
    count: int, is_gated: bool, dtype: torch.dtype, tiling: Tiling, device: torch.device
) -> None:
    """Compile as a launch would, on tensors that are as small as possible."""
    x = torch.empty(1, 8 * count, dtype=dtype, device=device)
    weight = torch.empty(1, 8, dtype=dtype, device=device)
    if is_gated:
        gated_linears(x, weight, weight, tiling, only_compile=True)
    else:
        counters = torch.empty(1, dtype=torch.int32, device=device)
        linears(x, [weight] * count, tiling, counters, only_compile=True)

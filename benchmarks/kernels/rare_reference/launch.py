"""Launches the kernel with a rare reference on what decode_attention takes."""

import torch
import triton

from benchmarks.kernels.rare_reference.split_kv import rare_split_kv
from vllm_gac.kernels.decode.launch import (
    DecodeScratch,
    capability_of,
    is_paired,
    split_and_merge,
)
from vllm_gac.kernels.decode.tiling import Tiling
from vllm_gac.kernels.torch_reference import LatentKeys
from vllm_gac.layout.cache_geometry import CacheGeometry


def decode_with_rare_reference(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    geometry: CacheGeometry,
    scale: float,
    output: torch.Tensor,
    scratch: DecodeScratch,
    latent: LatentKeys,
    tiling: Tiling,
    renew_every: int,
    *,
    max_query_len: int = 1,
    window: int | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    only_compile: bool = False,
) -> None:
    """The arguments of decode_attention, and this.

    Args:
        renew_every: tiles from one renewal of the softmax's reference to the next.
    """
    pairs = latent.inv_freq.shape[-1]
    own_constants = {
        "PAIRED": is_paired(kv_cache, geometry),
        "ASSEMBLY": capability_of(query.device) is not None,
        "REBUILT": latent.up.shape[1] // (2 * pairs),
        "PAIRS": pairs,
        "PADDED": triton.next_power_of_2(pairs),
        "RENEW_EVERY": renew_every,
    }
    split_and_merge(
        rare_split_kv,
        (latent.up, latent.inv_freq),
        own_constants,
        query,
        kv_cache,
        block_table,
        query_start_loc,
        seq_lens,
        geometry,
        scale,
        output,
        scratch,
        tiling,
        max_query_len=max_query_len,
        window=window,
        k_scale=k_scale,
        v_scale=v_scale,
        only_compile=only_compile,
    )

"""Launches the kernel with spans on what vllm_gac.kernels.decode.launch.decode_attention takes."""

import torch
import triton

from benchmarks.kernels.latent_spans.slow_pairs import SpanKeys
from benchmarks.kernels.latent_spans.split_kv import span_split_kv
from vllm_gac.kernels.decode.launch import DecodeScratch, capability_of, split_and_merge
from vllm_gac.kernels.decode.tiling import Tiling, pieces_of
from vllm_gac.layout.cache_geometry import CacheGeometry


def tiling_for(
    geometry: CacheGeometry, group: int, tile: int, warps: int, stages: int, programs: int
) -> Tiling:
    """Launch parameters; the sizes of latents and values are cut as in the served kernel.

    Args:
        geometry: head counts and sizes.
        group: original KV heads that a latent gives keys to.
        tile: tokens of a step.
        warps: of a program.
        stages: of the software pipeline.
        programs: on a multiprocessor.

    Raises:
        ValueError: the kernel does not know such heads.
    """
    key_pieces = pieces_of(geometry.key_size, largest=64)
    if sum(key_pieces) != geometry.key_size or key_pieces[2]:
        raise ValueError(
            f"latents of {geometry.key_size} numbers: the kernel with spans takes one or two "
            "powers of two from 16 on; choose 64, 96 or 128"
        )
    held = geometry.key_heads // geometry.value_heads * group
    if held > 2:
        raise ValueError(
            f"{held} original heads for each value head: the kernel with spans takes one or two; "
            "choose more value heads"
        )
    value_pieces = pieces_of(geometry.value_size, geometry.key_width, largest=64)
    return Tiling(key_pieces, value_pieces, tile, warps, stages, programs)


def decode_with_spans(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    geometry: CacheGeometry,
    scale: float,
    output: torch.Tensor,
    scratch: DecodeScratch,
    keys: SpanKeys,
    tiling: Tiling,
    *,
    max_query_len: int = 1,
    window: int | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    without_slow_pairs: bool = False,
    only_compile: bool = False,
) -> None:
    """The arguments of decode_attention, and these.

    Args:
        scratch: from scratch_for, for as many programs as `tiling` says.
        keys: from span_keys. Its span is a multiple of the tile.
        tiling: from tiling_for.
        without_slow_pairs: leave the slow pairs out of the scores. The output is then wrong, and
            the time a bound.

    Raises:
        ValueError: a span is no whole number of tiles.
    """
    split = keys.split
    if split.span % tiling.tile:
        raise ValueError(
            f"a span of {split.span} tokens: the tile has {tiling.tile}; choose a multiple of it"
        )
    own = (
        keys.fast_up,
        keys.slow_up,
        keys.fast_pair,
        keys.fast_freq,
        keys.slow_pair,
        keys.slow_freq,
        keys.slow_coefficients,
    )
    rows = geometry.query_heads // geometry.value_heads * max_query_len
    own_constants = {
        "REBUILT": keys.fast_up.shape[1],
        "PAIRS": len(split.fast) + len(split.slow),
        "FAST": keys.fast_pair.shape[0],
        "SLOW": keys.slow_pair.shape[0],
        "TERMS": 0 if without_slow_pairs else split.terms,
        "SPAN_TILES": split.span // tiling.tile,
        "SLOTS": max(8, triton.next_power_of_2(rows)),
        "ASSEMBLY": capability_of(query.device) is not None,
    }
    split_and_merge(
        span_split_kv,
        own,
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

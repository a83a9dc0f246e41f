"""Launches the kernel with spans on what vllm_gac.kernels.decode.launch.decode_attention takes."""

from typing import Any

import torch
import triton

from benchmarks.kernels.latent_spans.slow_pairs import SpanKeys
from benchmarks.kernels.latent_spans.split_kv import span_split_kv
from vllm_gac.kernels.decode.launch import LOG2_E, DecodeScratch, capability_of
from vllm_gac.kernels.decode.merge import merge
from vllm_gac.kernels.decode.schedule import sequence_bound
from vllm_gac.kernels.decode.tiling import Tiling, pieces_of
from vllm_gac.kernels.gpu_limits import HOPPER
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


def span_scratch(
    geometry: CacheGeometry, max_query_len: int, device: torch.device, programs: int
) -> DecodeScratch:
    """Room for the partial results of a launch with `programs` on each multiprocessor."""
    multiprocessors = 1
    if device.type == "cuda":
        multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    group = geometry.query_heads // geometry.value_heads
    rows = 2 * multiprocessors * programs * group * max_query_len
    return DecodeScratch(
        torch.empty(rows * geometry.value_size, device=device),
        torch.empty(rows, device=device),
        multiprocessors,
    )


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
        scratch: from span_scratch, for as many programs as `tiling` says.
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
    sequences = seq_lens.shape[0]
    group = geometry.query_heads // geometry.value_heads
    gpu = capability_of(query.device)
    overlap = gpu is not None and gpu >= HOPPER
    constants = {
        "HEADS": geometry.value_heads,
        "GROUP": group,
        "MAX_QUERIES": max_query_len,
        "VALUE_SIZE": geometry.value_size,
        "SEQUENCES": sequence_bound(sequences),
        "TILE": tiling.tile,
        "WINDOW": window or 0,
        "LEAST": tiling.least_tiles,
        "OVERLAP": overlap,
    }
    programs = scratch.multiprocessors * tiling.programs_per_multiprocessor
    partial = (scratch.values, scratch.log_sums, programs, scratch.multiprocessors, sequences)
    output_strides = (output.stride(0), output.stride(1))
    cache_strides = kv_cache.stride()[:3]
    grain = 1 if any(stride % 8 for stride in cache_strides) else 8
    rows = triton.next_power_of_2(group * max_query_len)
    run = _compile if only_compile else _launch
    run(
        span_split_kv,
        (programs,),
        query,
        kv_cache,
        block_table,
        query_start_loc,
        seq_lens,
        k_scale,
        v_scale,
        output,
        *partial,
        scale * LOG2_E,
        query.stride(0),
        query.stride(1),
        block_table.stride(0),
        *(stride // grain for stride in cache_strides),
        *output_strides,
        keys.fast_up,
        keys.slow_up,
        keys.fast_pair,
        keys.fast_freq,
        keys.slow_pair,
        keys.slow_freq,
        keys.slow_coefficients,
        **constants,
        PARTS=geometry.key_heads // geometry.value_heads,
        KEY_SIZE=geometry.key_size,
        K=tiling.key_pieces,
        V=tiling.value_pieces,
        ROWS=max(16, rows),
        BLOCK_SIZE=kv_cache.shape[2],
        GRAIN=grain,
        REBUILT=keys.fast_up.shape[1],
        PAIRS=len(split.fast) + len(split.slow),
        FAST=keys.fast_pair.shape[0],
        SLOW=keys.slow_pair.shape[0],
        TERMS=0 if without_slow_pairs else split.terms,
        SPAN_TILES=split.span // tiling.tile,
        SLOTS=max(8, rows),
        ASSEMBLY=gpu is not None,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
    )
    run(
        merge,
        (sequences, geometry.query_heads),
        query_start_loc,
        seq_lens,
        output,
        *partial,
        *output_strides,
        **constants,
        WIDTH=triton.next_power_of_2(geometry.value_size),
        num_warps=1,
        **({"launch_pdl": True} if overlap else {}),
    )


def _launch(kernel: Any, grid: tuple[int, ...], *arguments: object, **options: object) -> None:
    kernel[grid](*arguments, **options)


def _compile(kernel: Any, grid: tuple[int, ...], *arguments: object, **options: object) -> None:
    kernel.warmup(*arguments, grid=grid, **options)

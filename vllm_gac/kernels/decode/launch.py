"""Decode attention over the packed paged cache: split-KV GQA in Triton, any head sizes.

One launch serves a batch of any lengths (schedule.py); a second, tiny one merges what several
programs share. A head size that is no power of two is met as up to three powers of two (96 =
64 + 32), so nothing is loaded, staged or multiplied for padding. Several key heads of one value
head are one key as wide as the cache row, met by queries that are zero outside their own part:
the rows of a tensor-core tile that grouped queries leave empty pay for it.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
import triton

from vllm_gac.kernels.decode.latent_split_kv import latent_split_kv
from vllm_gac.kernels.decode.merge import merge
from vllm_gac.kernels.decode.schedule import sequence_bound
from vllm_gac.kernels.decode.split_kv import split_kv
from vllm_gac.kernels.decode.tiling import Tiling, tiling_of
from vllm_gac.kernels.gpu_limits import HOPPER
from vllm_gac.kernels.torch_reference import LatentKeys
from vllm_gac.layout.cache_geometry import CacheGeometry

LOG2_E = math.log2(math.e)


@dataclass(frozen=True, slots=True)
class DecodeScratch:
    """Partial results of one launch: two slots a program. Layers may share it, streams may not.

    values fp32 [programs, 2, rows, value_size] and log_sums fp32 [programs, 2, rows], flat: a
    smaller geometry uses a prefix. log_sums are base-2 logarithms of the softmax denominators.
    """

    values: torch.Tensor
    log_sums: torch.Tensor
    multiprocessors: int


def decode_scratch(
    geometry: CacheGeometry,
    max_query_len: int,
    device: torch.device,
    latent: LatentKeys | None = None,
) -> DecodeScratch:
    """Scratch for decode_attention of this geometry, with at most `max_query_len` query tokens."""
    multiprocessors = 1
    if device.type == "cuda":
        multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    most = max(
        _tiling(geometry, max_query_len, itemsize, latent, device).programs_per_multiprocessor
        for itemsize in (1, 2)
    )
    rows = 2 * multiprocessors * most * geometry.query_heads // geometry.value_heads * max_query_len
    return DecodeScratch(
        torch.empty(rows * geometry.value_size, dtype=torch.float32, device=device),
        torch.empty(rows, dtype=torch.float32, device=device),
        multiprocessors,
    )


def decode_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    geometry: CacheGeometry,
    scale: float,
    output: torch.Tensor,
    scratch: DecodeScratch,
    *,
    max_query_len: int = 1,
    window: int | None = None,
    latent: LatentKeys | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    tiling: Tiling | None = None,
    only_compile: bool = False,
) -> None:
    """Causal attention of 1..max_query_len last tokens of every sequence over its cached context.

    query [tokens, query_heads, query_size], its last dim contiguous; kv_cache [blocks,
    value_heads, block_size, row], rows contiguous, and slow to read unless the other strides are
    multiples of 8; block_table int32 [sequences, blocks]; query_start_loc int32 [sequences + 1];
    seq_lens int32 [sequences], the new tokens included. Writes output [tokens, query_heads,
    value_size]. A sequence without query tokens writes nothing, one of length 0 writes zeros. fp8
    caches hold key / k_scale and value / v_scale, fp32 tensors of one element. With `latent`,
    queries are rotated and as wide as the rebuilt keys; its `up` must be contiguous and of the
    queries' dtype.

    Nothing here looks at a value on the device: the launch can be captured and replayed. With
    `only_compile` nothing is launched, and of sizes that differ between launches only the number
    of sequences counts.
    """
    run = _compile if only_compile else _launch
    tiling = tiling or _tiling(geometry, max_query_len, kv_cache.itemsize, latent, query.device)
    sequences = seq_lens.shape[0]
    group = geometry.query_heads // geometry.value_heads
    gpu = capability_of(query.device)
    # Whether a kernel may start before the one it depends on has ended.
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
    # In eights: so the compiler knows that they are aligned, and loads 16 bytes at a time.
    grain = 1 if any(stride % 8 for stride in cache_strides) else 8
    arguments = (
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
    )
    key_constants = {
        "PARTS": geometry.key_heads // geometry.value_heads,
        "KEY_SIZE": geometry.key_size,
        "K": tiling.key_pieces,
        "V": tiling.value_pieces,
        "ROWS": max(16, triton.next_power_of_2(group * max_query_len)),
        "BLOCK_SIZE": kv_cache.shape[2],
        "GRAIN": grain,
        "num_warps": tiling.warps,
        "num_stages": tiling.stages,
    }
    if latent is None:
        run(split_kv, (programs,), *arguments, **constants, **key_constants)
    else:
        pairs = latent.inv_freq.shape[-1]
        run(
            latent_split_kv,
            (programs,),
            *arguments,
            latent.up,
            latent.inv_freq,
            **constants,
            **key_constants,
            REBUILT=_group_of(latent),
            PAIRS=pairs,
            PADDED=triton.next_power_of_2(pairs),
            ASSEMBLY=gpu is not None,
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


def _group_of(latent: LatentKeys | None) -> int:
    """How many original KV heads each latent gives keys to."""
    return 0 if latent is None else latent.up.shape[1] // (2 * latent.inv_freq.shape[-1])


def _tiling(
    geometry: CacheGeometry,
    max_query_len: int,
    itemsize: int,
    latent: LatentKeys | None,
    device: torch.device,
) -> Tiling:
    gpu = capability_of(device) or HOPPER
    return tiling_of(geometry, max_query_len, itemsize, _group_of(latent), gpu)


@functools.cache
def capability_of(device: torch.device) -> tuple[int, int] | None:
    """Compute capability of a CUDA GPU; None of a CPU, where Triton interprets."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None

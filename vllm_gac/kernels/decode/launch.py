"""Decode attention over the packed paged cache: split-KV GQA in Triton, any head sizes.

One launch serves a batch of any lengths (schedule.py). A second, tiny launch merges the results of
units that several programs shared. A head size that is not a power of two is cut into at most three
powers of two (96 = 64 + 32), so that no padding is loaded, staged or multiplied. Several key heads
of one value head are treated as one key of their total width, and each query is zero outside the
part of its own key head. This costs little: grouped queries leave rows of a tensor-core tile empty.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
import triton

from vllm_gac.errors import GacError
from vllm_gac.kernels.cache_write import is_by_head
from vllm_gac.kernels.decode.latent_keys import Rebuilt
from vllm_gac.kernels.decode.latent_split_kv import latent_split_kv
from vllm_gac.kernels.decode.merge import merge
from vllm_gac.kernels.decode.rows import CacheRow, Queries
from vllm_gac.kernels.decode.schedule import Tiles, sequence_bound
from vllm_gac.kernels.decode.split_kv import split_kv
from vllm_gac.kernels.decode.tiling import Tiling, tiling_of
from vllm_gac.kernels.gpu_limits import HOPPER
from vllm_gac.kernels.torch_reference import LatentKeys
from vllm_gac.layout.cache_geometry import CacheGeometry

LOG2_E = math.log2(math.e)


@dataclass(frozen=True, slots=True)
class DecodeScratch:
    """Workspace for the partial results of one launch. Layers may share it, CUDA streams may not.

    values: fp32 [programs, 2, rows, value_size], flat; a smaller geometry uses a prefix.
    log_sums: fp32 [programs, 2, rows], flat: base-2 logarithms of the softmax denominators.
    multiprocessors: how many the GPU has.
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
    """Scratch for decode_attention of this geometry, at most `max_query_len` tokens a sequence.

    It is large enough for every dtype of the cache that the GPU has room for. Raises GacError if
    the GPU's shared memory cannot hold a tile of such rows in any dtype.
    """
    programs, refusals = [], []
    for itemsize in (1, 2):
        try:
            tiling = _tiling(geometry, max_query_len, itemsize, latent, device)
        except GacError as error:  # the launch raises it, too, if the cache is of this dtype
            refusals.append(error)
        else:
            programs.append(tiling.programs_per_multiprocessor)
    if not programs:
        raise refusals[-1]
    multiprocessors = 1
    if device.type == "cuda":
        multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    group = geometry.query_heads // geometry.value_heads
    rows = 2 * multiprocessors * max(programs) * group * max_query_len
    return DecodeScratch(
        torch.empty(rows * geometry.value_size, dtype=torch.float32, device=device),
        torch.empty(rows, dtype=torch.float32, device=device),
        multiprocessors,
    )


def larger_scratch(a: DecodeScratch, b: DecodeScratch) -> DecodeScratch:
    """Scratch for what `a` or `b` is for, on the same GPU."""
    return DecodeScratch(
        max(a.values, b.values, key=torch.numel),
        max(a.log_sums, b.log_sums, key=torch.numel),
        a.multiprocessors,
    )


def takes(
    geometry: CacheGeometry,
    max_query_len: int,
    itemsize: int,
    latent: LatentKeys | None,
    device: torch.device,
) -> bool:
    """Whether the kernel has room for so many query tokens; `itemsize` is of a cached element."""
    try:
        _tiling(geometry, max_query_len, itemsize, latent, device)
    except GacError:
        return False
    return True


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
    kernel_sequences: int | None = None,
    only_compile: bool = False,
) -> None:
    """Causal attention of the last 1..max_query_len tokens of every sequence over its context.

    Nothing here reads a value on the device, so the launch can be captured and replayed. A sequence
    without query tokens writes nothing; a sequence of length 0 writes zeros.

    Args:
        query: [tokens, query_heads, query_size], rotated, its last dim contiguous.
        kv_cache: [blocks, value_heads, block_size, row], rows contiguous. It is slow to read unless
            the other strides are multiples of 8.
        block_table: int32 [sequences, blocks].
        query_start_loc: int32 [sequences + 1].
        seq_lens: int32 [sequences], the new tokens included.
        geometry: head counts and sizes.
        scale: of the scores.
        output: [tokens, query_heads, value_size]; this is what is written.
        scratch: from decode_scratch, for this geometry or a larger one.
        max_query_len: the most query tokens that a sequence has.
        window: tokens that a query sees, itself included; None for all.
        latent: what rebuilds latent keys. Queries are then as wide as the rebuilt keys. Its `up`
            must be contiguous and have the dtype of the queries.
        k_scale, v_scale: fp32, one element each, or one for each key head and for each value head.
            An fp8 cache holds key / k_scale and value / v_scale.
        kernel_sequences: the kernels are those for so many sequences, or more if there are more.
            Kernels differ by powers of four; with this, one kernel serves all numbers up to it.
        only_compile: compile the kernels for these arguments, but launch nothing. Of the sizes that
            differ between launches, only the number of sequences matters then.
    """
    sequences = seq_lens.shape[0]
    stride_unit = _stride_unit(kv_cache)
    fixed = _constants(
        geometry,
        max_query_len,
        sequence_bound(max(sequences, kernel_sequences or 1)),
        window or 0,
        kv_cache.shape[2],
        kv_cache.dtype,
        stride_unit,
        is_by_head(k_scale),
        _rebuilt(latent),
        capability_of(query.device),
    )
    run = _compile if only_compile else _launch
    programs = scratch.multiprocessors * fixed.programs_per_multiprocessor
    partial = (scratch.values, scratch.log_sums, programs, scratch.multiprocessors, sequences)
    output_strides = output.stride()[:2]
    extra = () if latent is None else (latent.up, latent.inv_freq)
    run(
        fixed.kernel,
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
        *query.stride()[:2],
        block_table.stride(0),
        *(stride // stride_unit for stride in kv_cache.stride()[:3]),
        *output_strides,
        *extra,
        **fixed.options,
    )
    run(
        merge,
        (sequences, geometry.query_heads),
        query_start_loc,
        seq_lens,
        output,
        *partial,
        *output_strides,
        **fixed.merge_options,
    )


@dataclass(frozen=True, slots=True)
class _Constants:
    """What launches of one kind have in common."""

    kernel: Any
    programs_per_multiprocessor: int
    options: dict[str, Any]
    merge_options: dict[str, Any]


# Cached: in a small batch the GPU waits for the host.
@functools.cache
def _constants(
    geometry: CacheGeometry,
    max_query_len: int,
    sequences: int,
    window: int,
    block_size: int,
    cache_dtype: torch.dtype,
    stride_unit: int,
    by_head: bool,
    rebuilt: Rebuilt | None,
    gpu: tuple[int, int] | None,
) -> _Constants:
    latent_group = 0 if rebuilt is None else rebuilt.heads
    tiling = tiling_of(geometry, max_query_len, cache_dtype.itemsize, latent_group, gpu or HOPPER)
    group = geometry.query_heads // geometry.value_heads
    # Whether a kernel may start before the one it depends on has ended.
    overlap = gpu is not None and gpu >= HOPPER
    # Two columns of an e4m3 cache are read as one number if keys and values have them in pairs.
    is_even = geometry.key_size % 2 == geometry.value_size % 2 == 0
    shared = {
        "TILES": Tiles(
            heads=geometry.value_heads,
            sequences=sequences,
            tile=tiling.tile,
            window=window,
            min_tiles=tiling.min_tiles,
        ),
        "QUERIES": Queries(
            group=group,
            max_query_len=max_query_len,
            rows=max(16, triton.next_power_of_2(group * max_query_len)),
        ),
        "OVERLAP": overlap,
    }
    row = CacheRow(
        keys_per_value=geometry.key_heads // geometry.value_heads,
        key_size=geometry.key_size,
        value_size=geometry.value_size,
        key_pieces=tiling.key_pieces,
        value_pieces=tiling.value_pieces,
        block_size=block_size,
        stride_unit=stride_unit,
        paired=cache_dtype == torch.float8_e4m3fn and is_even and stride_unit > 1,
        by_head=by_head,
        assembly=gpu is not None,
    )
    options = shared | {"CACHE": row, "num_warps": tiling.warps, "num_stages": tiling.stages}
    merge_options = shared | {
        "VALUE_SIZE": geometry.value_size,
        "WIDTH": triton.next_power_of_2(geometry.value_size),
        "num_warps": 1,
    }
    return _Constants(
        split_kv if rebuilt is None else latent_split_kv,
        tiling.programs_per_multiprocessor,
        options if rebuilt is None else options | {"REBUILT": rebuilt},
        merge_options | ({"launch_pdl": True} if overlap else {}),
    )


def _launch(kernel: Any, grid: tuple[int, ...], *arguments: object, **options: object) -> None:
    kernel[grid](*arguments, **options)


def _compile(kernel: Any, grid: tuple[int, ...], *arguments: object, **options: object) -> None:
    kernel.warmup(*arguments, grid=grid, **options)


def _stride_unit(kv_cache: torch.Tensor) -> int:
    """In how many elements to count strides: as many as 16 bytes have, else 8, else 1.

    The compiler then knows how rows are aligned, and loads as many bytes at a time.
    """
    strides = kv_cache.stride()[:3]
    for stride_unit in (16 // kv_cache.itemsize, 8):
        if not any(stride % stride_unit for stride in strides):
            return stride_unit
    return 1


def _rebuilt(latent: LatentKeys | None) -> Rebuilt | None:
    if latent is None:
        return None
    pairs = latent.inv_freq.shape[-1]
    return Rebuilt(_group_of(latent), pairs, triton.next_power_of_2(pairs))


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
    """Compute capability of a CUDA GPU; None for a CPU, where Triton interprets."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None

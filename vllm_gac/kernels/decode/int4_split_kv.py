"""Split-KV decode attention over rotary keys and values of four bits (int4_rows.py).

The names are those of split_kv.py. A row's numbers arrive as units of 16 bits, since the
instruction that brings a tile to the tensor cores moves 16-bit numbers. A unit has four columns. So
queries, keys, values and results are four matrices each, of every fourth column, and a product that
sums over columns is the sum of four.

Steps and bases are of a token, so they stay out of the products. With keys base + step * number,
scores are step * (query . number) + base * (sum of the query); values likewise, where the weights
take up the step, and the base adds the same to each column of a result.

    units       [TILE, columns / 4]: four numbers each
    shift       [ROWS]: what all columns of a result have more than acc
"""

# ruff: noqa: N803 -- Triton's convention: compile-time constants in capitals.
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from vllm_gac.errors import GacError
from vllm_gac.kernels.decode.launch import (
    DecodeScratch,
    capability_of,
    scratch_for,
    split_and_merge,
)
from vllm_gac.kernels.decode.rows import cache_piece, locate, store_result, unit_rows
from vllm_gac.kernels.decode.schedule import NOT_SPECIALIZED, leave_unit, next_unit, program_share
from vllm_gac.kernels.decode.softmax import online_softmax, visible_scores
from vllm_gac.kernels.decode.tiling import Tiling
from vllm_gac.kernels.gpu_limits import HOPPER, shared_memory
from vllm_gac.layout.cache_geometry import CacheGeometry

_RESERVED = 1024  # bytes of shared memory that every program takes beside what it uses


def int4_scratch(
    geometry: CacheGeometry, max_query_len: int, device: torch.device
) -> DecodeScratch:
    """Scratch for int4_decode_attention of this geometry."""
    tiling = int4_tiling(geometry, max_query_len, capability_of(device) or HOPPER)
    return scratch_for(geometry, max_query_len, device, tiling.programs_per_multiprocessor)


def int4_tiling(
    geometry: CacheGeometry, max_query_len: int, capability: tuple[int, int] = HOPPER
) -> Tiling:
    """Launch parameters, after those of an fp8 cache. They were not measured.

    Raises:
        GacError: The GPU's shared memory cannot hold a tile.
    """
    memory = shared_memory(capability)
    rows = max(16, geometry.query_heads // geometry.value_heads * max_query_len)
    # Tensor cores add up 16 columns at a time, in each of the four matrices.
    keys, values = (
        max(64, triton.next_power_of_2(size)) for size in (geometry.key_size, geometry.value_size)
    )
    warps = 2 if rows > 16 or values > 128 else 1
    for tile, stages in ((32, 3), (32, 2), (16, 2)):
        staged = tile * (stages - 1) * (keys + values) // 2
        needed = staged + 2 * rows * (keys + tile) + _RESERVED
        if needed <= memory.program:
            programs = min(8 // warps, memory.multiprocessor // needed)
            return Tiling((keys, 0, 0), (values, 0, 0), tile, warps, stages, programs)
    raise GacError(
        f"heads of ({geometry.key_size}, {geometry.value_size}): a decode kernel for four bits "
        f"needs {needed // 1024} KB of shared memory, {memory.program // 1024} KB is what the GPU "
        "gives it; serve smaller heads"
    )


def int4_decode_attention(
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
    tiling: Tiling | None = None,
    only_compile: bool = False,
) -> None:
    """Causal attention of the last 1..max_query_len tokens of every sequence over its context.

    Args:
        kv_cache: uint8 [blocks, heads, block_size, row_bytes] of int4_rows.py, rows contiguous and
            all strides multiples of 8.

    The others are those of decode_attention.
    """
    gpu = capability_of(query.device)
    split_and_merge(
        int4_split_kv,
        (),
        {"ASSEMBLY": gpu is not None},
        query,
        kv_cache,
        block_table,
        query_start_loc,
        seq_lens,
        geometry,
        scale,
        output,
        scratch,
        tiling or int4_tiling(geometry, max_query_len, gpu or HOPPER),
        max_query_len=max_query_len,
        window=window,
        k_scale=None,
        v_scale=None,
        only_compile=only_compile,
    )


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def int4_split_kv(
    query,
    kv_cache,
    block_table,
    query_start_loc,
    seq_lens,
    k_scale,
    v_scale,
    output,
    partial_values,
    partial_log_sums,
    programs,
    multiprocessors,
    sequences,
    scale,
    query_token_stride,
    query_head_stride,
    table_stride,
    cache_block_stride,
    cache_head_stride,
    cache_token_stride,
    output_token_stride,
    output_head_stride,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    MAX_QUERIES: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    SEQUENCES: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW: tl.constexpr,
    MIN_TILES: tl.constexpr,
    PARTS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    STRIDE_UNIT: tl.constexpr,
    OVERLAP: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):
    """One program: its share of the batch's tiles, unit by unit."""
    if OVERLAP:
        gdc_launch_dependents()  # lets merge() start, and wait, while this kernel ends
    position, end, sequence, before = program_share(
        query_start_loc, seq_lens, programs, multiprocessors, sequences,
        HEADS, SEQUENCES, TILE, WINDOW, MIN_TILES,
    )  # fmt: skip
    dtype: tl.constexpr = query.dtype.element_ty
    row = tl.arange(0, ROWS)
    row_token, row_head = row // GROUP, row % GROUP
    while position < end:
        unit = next_unit(query_start_loc, seq_lens, position, end, sequence, before, TILE, WINDOW)
        used = row_token < tl.minimum(unit.queries, MAX_QUERIES)
        query_row = unit_rows(
            query, unit, row_token, row_head, query_token_stride, query_head_stride, GROUP
        )
        column = tl.arange(0, K[0])[None, :]
        q = tl.load(
            query_row[:, None] + column, mask=used[:, None] & (column < KEY_SIZE), other=0.0
        )
        query_sum = tl.sum(q.to(tl.float32), 1)
        q0, q1, q2, q3 = _every_fourth(q)
        row_end = tl.where(used, unit.length - unit.queries + row_token + 1, 0)

        row_max = tl.full([ROWS], -1e30, tl.float32)  # finite: a row may see nothing yet
        row_sum = tl.zeros([ROWS], tl.float32)
        shift = tl.zeros([ROWS], tl.float32)
        acc0 = tl.zeros([ROWS, V[0] // 4], tl.float32)
        acc1, acc2, acc3 = acc0, acc0, acc0
        table = block_table + sequence.to(tl.int64) * table_stride
        head_cache = kv_cache + unit.head.to(tl.int64) * cache_head_stride * STRIDE_UNIT
        token = (unit.first + unit.skipped) * TILE + tl.arange(0, TILE)
        page, page_row = locate(token, unit, table, BLOCK_SIZE, WINDOW)
        for _ in range(unit.here):
            offset = page.to(tl.int64) * cache_block_stride + page_row * cache_token_stride
            # One step ahead in registers, so that the pipeline's stages are all left to rows.
            page, page_row = locate(token + TILE, unit, table, BLOCK_SIZE, WINDOW)
            cache_row = head_cache + offset * STRIDE_UNIT
            units = cache_row.to(tl.pointer_type(tl.uint16))[:, None]
            parameters = (cache_row + (KEY_SIZE + VALUE_SIZE) // 2).to(tl.pointer_type(tl.uint32))
            step, base = _two_halves(tl.load(parameters))
            keys = cache_piece(units, 0, K[0] // 4, KEY_SIZE // 4)
            k0, k1, k2, k3 = _numbers(keys, dtype, ASSEMBLY)
            scores = tl.dot(q0, tl.trans(k0))
            scores = tl.dot(q1, tl.trans(k1), scores)
            scores = tl.dot(q2, tl.trans(k2), scores)
            scores = tl.dot(q3, tl.trans(k3), scores)
            scores = scores * step[None, :] + query_sum[:, None] * base[None, :]
            scores = visible_scores(scores * scale, token, row_end, 1, WINDOW)
            weights, rescale, row_max = online_softmax(scores, row_max, 1)
            row_sum = row_sum * rescale + tl.sum(weights, 1)

            step, base = _two_halves(tl.load(parameters + 1))
            values = cache_piece(units + KEY_SIZE // 4, 0, V[0] // 4, VALUE_SIZE // 4)
            v0, v1, v2, v3 = _numbers(values, dtype, ASSEMBLY)
            rounded = (weights * step[None, :]).to(dtype)
            # Numbers lie around 1.5, so a weight's rounding error would count 1.5 times in every
            # column alike. `shift`, which has the exact weights, takes that back.
            middle = weights * (base + 1.5 * step)[None, :] - 1.5 * rounded.to(tl.float32)
            shift = shift * rescale + tl.sum(middle, 1)
            acc0 = tl.dot(rounded, v0, acc0 * rescale[:, None])
            acc1 = tl.dot(rounded, v1, acc1 * rescale[:, None])
            acc2 = tl.dot(rounded, v2, acc2 * rescale[:, None])
            acc3 = tl.dot(rounded, v3, acc3 * rescale[:, None])
            token += TILE

        output_row = unit_rows(
            output, unit, row_token, row_head, output_token_stride, output_head_stride, GROUP
        )
        result = tl.interleave(tl.interleave(acc0, acc2), tl.interleave(acc1, acc3))
        store_result(
            output_row, partial_values, partial_log_sums, unit, row, used,
            row_max, row_sum, v_scale, (result + shift[:, None], acc0, acc0), GROUP * MAX_QUERIES,
            False, V, VALUE_SIZE,
        )  # fmt: skip
        position, sequence, before = leave_unit(unit, position, sequence, before, HEADS)


@triton.jit
def _every_fourth(x):
    """Columns 4j, 4j + 1, 4j + 2 and 4j + 3 of x [ROWS, SIZE], each [ROWS, SIZE / 4]."""
    even, odd = tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
    x0, x2 = tl.split(tl.reshape(even, [x.shape[0], x.shape[1] // 4, 2]))
    x1, x3 = tl.split(tl.reshape(odd, [x.shape[0], x.shape[1] // 4, 2]))
    return x0, x1, x2, x3


@triton.jit
def _two_halves(bits):
    """Two fp16 numbers of 32 bits, in fp32, the one in the low bits first."""
    low = (bits & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
    high = (bits >> 16).to(tl.uint16).to(tl.float16, bitcast=True)
    return low.to(tl.float32), high.to(tl.float32)


def _assembly(moves: Sequence[str], mask: str, one: str) -> tl.constexpr:
    """Makes the four numbers of two units: `moves` put each one's bits where `mask` keeps them."""
    made = (
        f"{move}; lop3.b32 ${place}, moved, {mask}, {one}, 0xEA;"  # moved & mask | one
        for place, move in enumerate(moves)
    )
    return tl.constexpr("{ .reg .b32 moved; " + " ".join(made) + " }")


_TO_BF16 = _assembly(
    (
        "shl.b32 moved, $4, 3",
        "shr.b32 moved, $4, 1",
        "shr.b32 moved, $4, 5",
        "shr.b32 moved, $4, 9",
    ),
    mask="0x00780078",
    one="0x3F803F80",
)
_TO_FP16 = _assembly(
    (
        "shl.b32 moved, $4, 6",
        "shl.b32 moved, $4, 2",
        "shr.b32 moved, $4, 2",
        "shr.b32 moved, $4, 6",
    ),
    mask="0x03C003C0",
    one="0x3C003C00",
)


@triton.jit
def _numbers(units, dtype: tl.constexpr, ASSEMBLY: tl.constexpr):
    """The four numbers 1 + n / 16 of each unit, four matrices of the shape of `units`.

    Each takes a shift and one logical instruction for two units: n goes behind the exponent of 1.
    """
    if ASSEMBLY and dtype == tl.bfloat16:  # Triton 3.6 takes no constexpr among the types
        return tl.inline_asm_elementwise(
            _TO_BF16,
            "=r,=r,=r,=r,r",
            [units],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    elif ASSEMBLY:
        return tl.inline_asm_elementwise(
            _TO_FP16,
            "=r,=r,=r,=r,r",
            [units],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        return (
            _number(units, 0).to(dtype),
            _number(units, 4).to(dtype),
            _number(units, 8).to(dtype),
            _number(units, 12).to(dtype),
        )


@triton.jit
def _number(units, BITS: tl.constexpr):
    return 1.0 + ((units >> BITS) & 15).to(tl.float32) / 16

"""Split-KV attention of grouped queries over the packed paged cache, for keys cached rotated."""

# ruff: noqa: N803, N806 -- Triton's convention: compile-time constants in capitals.
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from vllm_gac.kernels.decode.rows import cache_piece, locate, store_result
from vllm_gac.kernels.decode.schedule import (
    NOT_SPECIALIZED,
    tile_counts,
    tile_range,
    tiles_per_program,
)


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def split_kv(
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
    LEAST: tl.constexpr,
    PARTS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    K0: tl.constexpr,
    K1: tl.constexpr,
    K2: tl.constexpr,
    V0: tl.constexpr,
    V1: tl.constexpr,
    V2: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    GRAIN: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program: its share of the batch's tiles, unit by unit."""
    if OVERLAP:
        gdc_launch_dependents()  # lets merge() start, and wait, while this kernel ends
    counts = tile_counts(query_start_loc, seq_lens, sequences, SEQUENCES, TILE, WINDOW)
    share, total = tiles_per_program(counts, programs, multiprocessors, HEADS, LEAST)
    position = tl.program_id(0) * share
    end = tl.minimum(position + share, total)
    index = tl.arange(0, SEQUENCES)
    sequence = tl.sum((tl.cumsum(counts, 0) * HEADS <= position).to(tl.int32))
    before = tl.sum(tl.where(index < sequence, counts, 0)) * HEADS  # tiles of earlier sequences

    KEY_WIDTH: tl.constexpr = PARTS * KEY_SIZE
    if k_scale is not None:
        scale *= tl.load(k_scale)
    row = tl.arange(0, ROWS)
    row_token, row_head = row // GROUP, row % GROUP
    part = row_head // (GROUP // PARTS)
    while position < end:
        length = tl.load(seq_lens + sequence)
        query_start = tl.load(query_start_loc + sequence)
        queries = tl.load(query_start_loc + sequence + 1) - query_start
        first, last = tile_range(length, queries, TILE, WINDOW)
        count = last - first
        head = (position - before) // count
        skipped = position - before - head * count
        here = tl.minimum(count - skipped, end - position)

        used = row_token < tl.minimum(queries, MAX_QUERIES)
        query_row = (query_start + row_token).to(tl.int64) * query_token_stride
        query_row = query + query_row + (head * GROUP + row_head) * query_head_stride
        # e4m3 converts to fp16 in one instruction for two numbers; to bf16 it takes a dozen.
        fp8: tl.constexpr = kv_cache.dtype.element_ty.primitive_bitwidth == 8
        dtype: tl.constexpr = tl.float16 if fp8 else query.dtype.element_ty
        q0 = _query_piece(query_row, used, part, KEY_SIZE, PARTS, 0, K0).to(dtype)
        q1 = _query_piece(query_row, used, part, KEY_SIZE, PARTS, K0, K1).to(dtype)
        q2 = _query_piece(query_row, used, part, KEY_SIZE, PARTS, K0 + K1, K2).to(dtype)
        row_end = tl.where(used, length - queries + row_token + 1, 0)  # tokens a row sees, absolute

        highest = tl.full([ROWS], -1e30, tl.float32)  # finite: a row may see nothing yet
        denominator = tl.zeros([ROWS], tl.float32)
        acc0 = tl.zeros([ROWS, V0], tl.float32)
        acc1 = tl.zeros([ROWS, V1 if V1 > 0 else 16], tl.float32)
        acc2 = tl.zeros([ROWS, V2 if V2 > 0 else 16], tl.float32)
        table = block_table + sequence.to(tl.int64) * table_stride
        head_cache = kv_cache + (head * cache_head_stride).to(tl.int64) * GRAIN
        oldest = tl.maximum(length - queries - WINDOW + 1, 0) if WINDOW > 0 else 0
        token = (first + skipped) * TILE + tl.arange(0, TILE)
        page, page_row = locate(token, length, oldest, table, BLOCK_SIZE)
        for _ in range(here):
            offset = page.to(tl.int64) * cache_block_stride + page_row * cache_token_stride
            # One step ahead in registers, so that the pipeline's stages are all left to rows.
            page, page_row = locate(token + TILE, length, oldest, table, BLOCK_SIZE)
            cache_row = head_cache + (offset * GRAIN)[:, None]
            k0 = cache_piece(cache_row, 0, K0, KEY_WIDTH)
            scores = tl.dot(q0, tl.trans(k0.to(dtype)))
            if K1 > 0:
                k1 = cache_piece(cache_row, K0, K1, KEY_WIDTH)
                scores = tl.dot(q1, tl.trans(k1.to(dtype)), scores)
            if K2 > 0:
                k2 = cache_piece(cache_row, K0 + K1, K2, KEY_WIDTH)
                scores = tl.dot(q2, tl.trans(k2.to(dtype)), scores)
            visible = token[None, :] < row_end[:, None]
            if WINDOW > 0:
                visible &= token[None, :] >= row_end[:, None] - WINDOW
            scores = tl.where(visible, scores * scale, float("-inf"))

            higher = tl.maximum(highest, tl.max(scores, 1))
            shrink = tl.exp2(highest - higher)
            highest = higher
            weights = tl.exp2(scores - higher[:, None])
            denominator = denominator * shrink + tl.sum(weights, 1)
            weights = weights.to(dtype)
            v0 = cache_piece(cache_row + KEY_WIDTH, 0, V0, VALUE_SIZE)
            acc0 = tl.dot(weights, v0.to(dtype), acc0 * shrink[:, None])
            if V1 > 0:
                v1 = cache_piece(cache_row + KEY_WIDTH, V0, V1, VALUE_SIZE)
                acc1 = tl.dot(weights, v1.to(dtype), acc1 * shrink[:, None])
            if V2 > 0:
                v2 = cache_piece(cache_row + KEY_WIDTH, V0 + V1, V2, VALUE_SIZE)
                acc2 = tl.dot(weights, v2.to(dtype), acc2 * shrink[:, None])
            token += TILE

        output_row = (query_start + row_token).to(tl.int64) * output_token_stride
        output_row = output + output_row + (head * GROUP + row_head) * output_head_stride
        slot = 2 * tl.program_id(0) + (skipped == 0).to(tl.int32)
        store_result(
            output_row,
            partial_values,
            partial_log_sums,
            slot * (GROUP * MAX_QUERIES) + row,
            here == count,
            used,
            highest,
            denominator,
            v_scale,
            acc0,
            acc1,
            acc2,
            V0,
            V1,
            V2,
            VALUE_SIZE,
        )

        position += here
        if position - before == count * HEADS:
            before = position
            sequence += 1


@triton.jit
def _query_piece(
    query_row,
    used,
    part,
    KEY_SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    START: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Columns START.. of the queries as wide as a cache row's keys, [rows, SIZE].

    A query is zero outside the part of the row that its own key head fills.
    """
    column = START + tl.arange(0, SIZE if SIZE > 0 else 16)[None, :]
    mask = used[:, None] & (column < KEY_SIZE * PARTS)
    if PARTS > 1:
        column = column - part[:, None] * KEY_SIZE
        mask &= (column >= 0) & (column < KEY_SIZE)
    return tl.load(query_row[:, None] + column, mask=mask, other=0.0)

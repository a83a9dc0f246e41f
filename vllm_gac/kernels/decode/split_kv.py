"""Split-KV decode attention for rotary keys: the cache holds keys that are already rotated.

What both decode kernels call things (latent_split_kv.py adds a few more):

    page        a block of CACHE.block_size tokens in the cache
    tile        TILE consecutive tokens of a sequence's context: one step of a kernel's inner loop
    unit        one value head of one sequence; its tiles may be shared by several programs
    row         of the queries: query token r // group with query head r % group of the unit;
                of the cache: the keys and the value of one token and one value head
    piece       a head size is cut into at most three powers of two (96 = 64 + 32), because Triton's
                tensors have no other sizes; a piece of size 0 is absent
    slot        where a program leaves the partial result of a unit that it shares with others:
                2 * program for the unit that it starts inside, 2 * program + 1 for the one it ends
                inside

    query           [tokens, query_heads, query_size]
    kv_cache        [pages, value heads, tokens of a page, keys | value]
    block_table     [sequences, pages]: the pages of each sequence
    query_start_loc [sequences + 1]: the first query token of each sequence
    seq_lens        [sequences]: tokens in the context of each, the new ones included
    k_scale         one number, or one for each key head, or None: cached keys times k_scale are the
                keys. v_scale likewise, of value heads
    output          [tokens, query_heads, value_size]
    partial_values, partial_log_sums    [slots, group * max_query_len, value_size], and without
                the last dim: normalized partial results, and log2 of their softmax denominators
    scale       of the scores, times log2(e): all exponentials are to base 2
    *_stride    in elements; those of the cache in units of CACHE.stride_unit elements

    TILES       how the batch is cut into tiles (schedule.py: Tiles); TILE is TILES.tile
    QUERIES     what a unit's queries are (rows.py: Queries); ROWS is QUERIES.rows
    CACHE       what a row of the cache is, and how it is read (rows.py: CacheRow)
    OVERLAP     whether the next kernel may start before this one ends

    position, end, before   scalars, counted in tiles along the line of all tiles (schedule.py)
    part        [ROWS]: which of the value head's key heads a row belongs to
    row_end     [ROWS]: a row sees the tokens of the context before this position
    used        [ROWS]: whether there is a query for this row
    token       [TILE]: positions of the tile's tokens in the context
    row_max     [ROWS]: the highest score of each row so far; exponentials are relative to it
    rescale     [ROWS]: what the sums so far are multiplied by when `row_max` rises
    row_sum     [ROWS]: the sum of the weights so far
    acc         the sum of the weighted values so far, as softmax.no_values describes it
"""

# ruff: noqa: N803, N806 -- Triton's convention: compile-time constants in capitals.
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from vllm_gac.kernels.decode.byte_pairs import even_and_odd
from vllm_gac.kernels.decode.rows import cache_piece, locate, store_result, unit_rows
from vllm_gac.kernels.decode.schedule import NOT_SPECIALIZED, leave_unit, next_unit, program_share
from vllm_gac.kernels.decode.softmax import (
    accumulate_values,
    no_values,
    online_softmax,
    value_pieces,
    visible_scores,
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
    TILES: tl.constexpr,
    QUERIES: tl.constexpr,
    CACHE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """One program: its share of the batch's tiles, unit by unit."""
    # Up to Triton 3.7, lists and static_range take a constant, but no field of one.
    TILE: tl.constexpr = TILES.tile
    ROWS: tl.constexpr = QUERIES.rows
    if OVERLAP:
        gdc_launch_dependents()  # lets merge() start, and wait, while this kernel ends
    position, end, sequence, before = program_share(
        query_start_loc, seq_lens, programs, multiprocessors, sequences, TILES
    )
    KEY_WIDTH: tl.constexpr = CACHE.keys_per_value * CACHE.key_size
    # e4m3 converts to fp16 in one instruction for two elements; to bf16 it takes a dozen.
    fp8: tl.constexpr = kv_cache.dtype.element_ty.primitive_bitwidth == 8
    dtype: tl.constexpr = tl.float16 if fp8 else query.dtype.element_ty
    if k_scale is not None and not CACHE.by_head:
        scale *= tl.load(k_scale)
    row = tl.arange(0, ROWS)
    row_token, row_head = row // QUERIES.group, row % QUERIES.group
    part = row_head // (QUERIES.group // CACHE.keys_per_value)
    while position < end:
        unit = next_unit(query_start_loc, seq_lens, position, end, sequence, before, TILES)
        used = row_token < tl.minimum(unit.queries, QUERIES.max_query_len)
        query_row = unit_rows(
            query, unit, row_token, row_head, query_token_stride, query_head_stride, QUERIES
        )
        q = _query_pieces(query_row, used, part, CACHE, dtype)
        row_end = tl.where(used, unit.length - unit.queries + row_token + 1, 0)

        row_scale = scale
        if CACHE.by_head:
            row_scale = (scale * tl.load(k_scale + unit.head * CACHE.keys_per_value + part))[
                :, None
            ]
        row_max = tl.full([ROWS], -1e30, tl.float32)  # finite: a row may see nothing yet
        row_sum = tl.zeros([ROWS], tl.float32)
        acc = no_values(ROWS, CACHE)
        table = block_table + sequence.to(tl.int64) * table_stride
        head_cache = kv_cache + unit.head.to(tl.int64) * cache_head_stride * CACHE.stride_unit
        token = (unit.first + unit.skipped) * TILE + tl.arange(0, TILE)
        page, page_row = locate(token, unit, table, CACHE.block_size, TILES.window)
        for _ in range(unit.here):
            offset = page.to(tl.int64) * cache_block_stride + page_row * cache_token_stride
            # One step ahead in registers, so that the pipeline's stages are all left to rows.
            page, page_row = locate(token + TILE, unit, table, CACHE.block_size, TILES.window)
            cache_row = head_cache + (offset * CACHE.stride_unit)[:, None]
            scores = _scores(q, cache_row, CACHE, dtype) * row_scale
            scores = visible_scores(scores, token, row_end, 1, TILES.window)
            weights, rescale, row_max = online_softmax(scores, row_max, 1)
            row_sum = row_sum * rescale + tl.sum(weights, 1)
            value_row = cache_row + KEY_WIDTH
            acc = accumulate_values(acc, weights.to(dtype), rescale[:, None], value_row, CACHE)
            token += TILE

        output_row = unit_rows(
            output, unit, row_token, row_head, output_token_stride, output_head_stride, QUERIES
        )
        store_result(
            output_row, partial_values, partial_log_sums, unit, row, used,
            row_max, row_sum, v_scale, value_pieces(acc, CACHE), QUERIES, CACHE,
        )  # fmt: skip
        position, sequence, before = leave_unit(unit, position, sequence, before, TILES)


@triton.jit
def _query_pieces(query_row, used, part, CACHE: tl.constexpr, dtype: tl.constexpr):
    """A unit's queries in `dtype`, in pieces [ROWS, key_pieces[i]]; part [ROWS]: a row's key head.

    If the row is paired, even and odd columns of each piece, three and three half as wide.
    """
    K: tl.constexpr = CACHE.key_pieces
    q0 = _query_piece(query_row, used, part, 0, K[0], CACHE).to(dtype)
    q1 = _query_piece(query_row, used, part, K[0], K[1], CACHE).to(dtype)
    q2 = _query_piece(query_row, used, part, K[0] + K[1], K[2], CACHE).to(dtype)
    odd0, odd1, odd2 = q0, q1, q2
    if CACHE.paired:
        q0, odd0 = _split_columns(q0)
        q1, odd1 = _split_columns(q1)
        q2, odd2 = _split_columns(q2)
    return q0, q1, q2, odd0, odd1, odd2


@triton.jit
def _split_columns(x):
    """Even and odd columns of x [ROWS, SIZE], both [ROWS, SIZE / 2]."""
    return tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))


@triton.jit
def _query_piece(
    query_row,
    used,
    part,
    START: tl.constexpr,
    SIZE: tl.constexpr,
    CACHE: tl.constexpr,
):
    """Columns START..START + SIZE of queries that are as wide as a cache row's keys, [ROWS, SIZE].

    A query is zero outside the part of the row that holds its own key head.
    """
    column = START + tl.arange(0, SIZE if SIZE > 0 else 16)[None, :]
    mask = used[:, None] & (column < CACHE.key_size * CACHE.keys_per_value)
    if CACHE.keys_per_value > 1:
        column = column - part[:, None] * CACHE.key_size
        mask &= (column >= 0) & (column < CACHE.key_size)
    return tl.load(query_row[:, None] + column, mask=mask, other=0.0)


@triton.jit
def _scores(q, cache_row, CACHE: tl.constexpr, dtype: tl.constexpr):
    """Queries times a tile's keys, [ROWS, TILE]."""
    K: tl.constexpr = CACHE.key_pieces
    scores = _add_scores(None, q[0], q[3], cache_row, 0, K[0], CACHE, dtype)
    if K[1] > 0:
        scores = _add_scores(scores, q[1], q[4], cache_row, K[0], K[1], CACHE, dtype)
    if K[2] > 0:
        scores = _add_scores(scores, q[2], q[5], cache_row, K[0] + K[1], K[2], CACHE, dtype)
    return scores


@triton.jit
def _add_scores(
    scores,
    q,
    odd,
    cache_row,
    START: tl.constexpr,
    SIZE: tl.constexpr,
    CACHE: tl.constexpr,
    dtype: tl.constexpr,
):
    """`scores`, None for zeros, plus a piece of the queries times that of the keys."""
    KEY_WIDTH: tl.constexpr = CACHE.keys_per_value * CACHE.key_size
    if CACHE.paired:
        keys, odd_keys = even_and_odd(cache_row, START, SIZE, KEY_WIDTH, CACHE.assembly)
        scores = tl.dot(q, tl.trans(keys), scores)
        return tl.dot(odd, tl.trans(odd_keys), scores)
    else:
        keys = cache_piece(cache_row, START, SIZE, KEY_WIDTH)
        return tl.dot(q, tl.trans(keys.to(dtype)), scores)

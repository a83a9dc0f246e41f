"""Split-KV decode attention for rotary keys: the cache holds keys that are already rotated.

What both decode kernels call things (latent_split_kv.py adds a few more):

    page        a block of BLOCK_SIZE tokens in the cache
    tile        TILE consecutive tokens of a sequence's context: one step of a kernel's inner loop
    unit        one value head of one sequence; its tiles may be shared by several programs
    row         of the queries: query token r // GROUP with query head r % GROUP of the unit;
                of the cache: the keys and the value of one token and one value head
    piece       a head size is cut into at most three powers of two (96 = 64 + 32), because Triton's
                tensors have no other sizes; a piece of size 0 is absent
    slot        where a program leaves the partial result of a unit that it shares with others:
                2 * program for the unit that it starts inside, 2 * program + 1 for the one it ends
                inside

    query           [tokens, query_heads, query_size]
    kv_cache        [pages, HEADS, BLOCK_SIZE, keys | value]
    block_table     [sequences, pages]: the pages of each sequence
    query_start_loc [sequences + 1]: the first query token of each sequence
    seq_lens        [sequences]: tokens in the context of each, the new ones included
    k_scale         one number, or one for each key head, or None: cached keys times k_scale are the
                keys. v_scale likewise, of value heads
    output          [tokens, query_heads, VALUE_SIZE]
    partial_values, partial_log_sums    [slots, GROUP * MAX_QUERIES, VALUE_SIZE], and without the
                last dim: normalized partial results, and log2 of their softmax denominators
    scale       of the scores, times log2(e): all exponentials are to base 2
    *_stride    in elements; those of the cache in units of STRIDE_UNIT elements

    HEADS       value heads
    GROUP       query heads of one value head
    PARTS       key heads of one value head
    MAX_QUERIES query tokens of a sequence, at most
    ROWS        GROUP * MAX_QUERIES, rounded up to a power of two that tensor cores take
    SEQUENCES   an upper bound of `sequences`, a power of two
    WINDOW      tokens that a query sees, itself included; 0 without a sliding window
    MIN_TILES   the fewest tiles that a program takes: merging more parts costs more than it gains
    K, V        sizes of the three pieces of a row's keys and of its value
    STRIDE_UNIT 16 or 8 if all strides of the cache are multiples of it, else 1: the compiler then
                knows how rows are aligned
    BY_HEAD     whether each head has a scale of its own
    OVERLAP     whether the next kernel may start before this one ends
    PAIRED      whether two columns of an fp8 cache are read as one number (byte_pairs.py)
    ASSEMBLY    whether the GPU's own instructions may be used; not in Triton's interpreter

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
    BY_HEAD: tl.constexpr,
    PAIRED: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):
    """One program: its share of the batch's tiles, unit by unit."""
    if OVERLAP:
        gdc_launch_dependents()  # lets merge() start, and wait, while this kernel ends
    position, end, sequence, before = program_share(
        query_start_loc, seq_lens, programs, multiprocessors, sequences,
        HEADS, SEQUENCES, TILE, WINDOW, MIN_TILES,
    )  # fmt: skip
    KEY_WIDTH: tl.constexpr = PARTS * KEY_SIZE
    # e4m3 converts to fp16 in one instruction for two elements; to bf16 it takes a dozen.
    fp8: tl.constexpr = kv_cache.dtype.element_ty.primitive_bitwidth == 8
    dtype: tl.constexpr = tl.float16 if fp8 else query.dtype.element_ty
    if k_scale is not None and not BY_HEAD:
        scale *= tl.load(k_scale)
    row = tl.arange(0, ROWS)
    row_token, row_head = row // GROUP, row % GROUP
    part = row_head // (GROUP // PARTS)
    while position < end:
        unit = next_unit(query_start_loc, seq_lens, position, end, sequence, before, TILE, WINDOW)
        used = row_token < tl.minimum(unit.queries, MAX_QUERIES)
        query_row = unit_rows(
            query, unit, row_token, row_head, query_token_stride, query_head_stride, GROUP
        )
        q = _query_pieces(query_row, used, part, KEY_SIZE, PARTS, K, dtype, PAIRED)
        row_end = tl.where(used, unit.length - unit.queries + row_token + 1, 0)

        row_scale = scale
        if BY_HEAD:
            row_scale = (scale * tl.load(k_scale + unit.head * PARTS + part))[:, None]
        row_max = tl.full([ROWS], -1e30, tl.float32)  # finite: a row may see nothing yet
        row_sum = tl.zeros([ROWS], tl.float32)
        acc = no_values(ROWS, V, PAIRED)
        table = block_table + sequence.to(tl.int64) * table_stride
        head_cache = kv_cache + unit.head.to(tl.int64) * cache_head_stride * STRIDE_UNIT
        token = (unit.first + unit.skipped) * TILE + tl.arange(0, TILE)
        page, page_row = locate(token, unit, table, BLOCK_SIZE, WINDOW)
        for _ in range(unit.here):
            offset = page.to(tl.int64) * cache_block_stride + page_row * cache_token_stride
            # One step ahead in registers, so that the pipeline's stages are all left to rows.
            page, page_row = locate(token + TILE, unit, table, BLOCK_SIZE, WINDOW)
            cache_row = head_cache + (offset * STRIDE_UNIT)[:, None]
            scores = _scores(q, cache_row, K, KEY_WIDTH, dtype, PAIRED, ASSEMBLY) * row_scale
            scores = visible_scores(scores, token, row_end, 1, WINDOW)
            weights, rescale, row_max = online_softmax(scores, row_max, 1)
            row_sum = row_sum * rescale + tl.sum(weights, 1)
            acc = accumulate_values(
                acc, weights.to(dtype), rescale[:, None], cache_row + KEY_WIDTH,
                V, VALUE_SIZE, PAIRED, ASSEMBLY,
            )  # fmt: skip
            token += TILE

        output_row = unit_rows(
            output, unit, row_token, row_head, output_token_stride, output_head_stride, GROUP
        )
        store_result(
            output_row, partial_values, partial_log_sums, unit, row, used,
            row_max, row_sum, v_scale, value_pieces(acc, PAIRED), GROUP * MAX_QUERIES,
            BY_HEAD, V, VALUE_SIZE,
        )  # fmt: skip
        position, sequence, before = leave_unit(unit, position, sequence, before, HEADS)


@triton.jit
def _query_pieces(
    query_row,
    used,
    part,
    KEY_SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    K: tl.constexpr,
    dtype: tl.constexpr,
    PAIRED: tl.constexpr,
):
    """A unit's queries in `dtype`, in pieces [ROWS, K[i]]; part [ROWS] is a row's key head.

    If PAIRED, even and odd columns of each piece, three and three pieces [ROWS, K[i] / 2].
    """
    q0 = _query_piece(query_row, used, part, KEY_SIZE, PARTS, 0, K[0]).to(dtype)
    q1 = _query_piece(query_row, used, part, KEY_SIZE, PARTS, K[0], K[1]).to(dtype)
    q2 = _query_piece(query_row, used, part, KEY_SIZE, PARTS, K[0] + K[1], K[2]).to(dtype)
    odd0, odd1, odd2 = q0, q1, q2
    if PAIRED:
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
    KEY_SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    START: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Columns START..START + SIZE of queries that are as wide as a cache row's keys, [ROWS, SIZE].

    A query is zero outside the part of the row that holds its own key head.
    """
    column = START + tl.arange(0, SIZE if SIZE > 0 else 16)[None, :]
    mask = used[:, None] & (column < KEY_SIZE * PARTS)
    if PARTS > 1:
        column = column - part[:, None] * KEY_SIZE
        mask &= (column >= 0) & (column < KEY_SIZE)
    return tl.load(query_row[:, None] + column, mask=mask, other=0.0)


@triton.jit
def _scores(
    q,
    cache_row,
    K: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    dtype: tl.constexpr,
    PAIRED: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):
    """Queries times a tile's keys, [ROWS, TILE]."""
    scores = _add_scores(None, q[0], q[3], cache_row, 0, K[0], KEY_WIDTH, dtype, PAIRED, ASSEMBLY)
    if K[1] > 0:
        scores = _add_scores(
            scores, q[1], q[4], cache_row, K[0], K[1], KEY_WIDTH, dtype, PAIRED, ASSEMBLY
        )
    if K[2] > 0:
        scores = _add_scores(
            scores, q[2], q[5], cache_row, K[0] + K[1], K[2], KEY_WIDTH, dtype, PAIRED, ASSEMBLY
        )
    return scores


@triton.jit
def _add_scores(
    scores,
    q,
    odd,
    cache_row,
    START: tl.constexpr,
    SIZE: tl.constexpr,
    KEY_WIDTH: tl.constexpr,
    dtype: tl.constexpr,
    PAIRED: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):
    """`scores`, None for zeros, plus a piece of the queries times that of the keys."""
    if PAIRED:
        keys, odd_keys = even_and_odd(cache_row, START, SIZE, KEY_WIDTH, ASSEMBLY)
        scores = tl.dot(q, tl.trans(keys), scores)
        return tl.dot(odd, tl.trans(odd_keys), scores)
    else:
        keys = cache_piece(cache_row, START, SIZE, KEY_WIDTH)
        return tl.dot(q, tl.trans(keys.to(dtype)), scores)

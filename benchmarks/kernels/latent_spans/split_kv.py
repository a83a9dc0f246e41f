"""Split-KV decode attention for latent keys whose slow pairs are met in the latent space.

The fast rotary pairs are rebuilt and rotated as in vllm_gac/kernels/decode/latent_split_kv.py. The
slow ones add the sum over j of T_j(x) (w_j . c) to a score, where c is the token's latent and x its
place in a span of tokens (slow_pairs.py). The vectors w_j of a span are made before its first tile.

Names are those of latent_split_kv.py, and these:

    fast_up     [HEADS * PARTS, REBUILT, 2, FAST, KEY_SIZE]: rows of the up-projections
    slow_up     [HEADS * PARTS, REBUILT, SLOW, 2, KEY_SIZE], fp16: the other rows
    fast_pair, fast_freq    [FAST]: index of each pair in a head, and its radians per token
    slow_pair, slow_freq    [SLOW]: likewise
    slow_coefficients       [TERMS, SLOW], fp32: of Chebyshev's polynomials

    FAST, SLOW  pairs, padded to powers of two; up-projections of padding are 0
    TERMS       polynomials; 0 leaves the slow pairs out, which gives wrong scores and a bound
    SPAN_TILES  tiles of a span
    HALF        tokens of half a span
    SLOTS       rows of the unit's queries, rounded up to a power of two, at least 8
    COLUMNS     TERMS * SLOTS: column j * SLOTS + r belongs to polynomial j and row r
    HELD        original heads of a value head: PARTS * REBUILT, 1 or 2

    turned_low, turned_high [SLOW, COLUMNS], fp32: queries rotated backward by the position of the
                next span's center, times coefficients
    span_cos, span_sin      [SLOW, 1]: of the angles from one span to the next
    ups         of each original head, the pieces [K[i], 2 * FAST] of its fast rows
    columns     of each latent of the value head, the pieces [K[i], COLUMNS] of a span's vectors
    place       [TILE]: x of each token, from -1 to 1 within the span

A latent has at most two pieces, and a value head at most two original heads.
"""

# ruff: noqa: N803, N806 -- Triton's convention: compile-time constants in capitals.
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from vllm_gac.kernels.decode.latent_keys import (
    cos_sin,
    load_latents,
    rotate,
    rotate_back,
    turned_queries,
)
from vllm_gac.kernels.decode.rows import locate, store_result, unit_rows
from vllm_gac.kernels.decode.schedule import NOT_SPECIALIZED, leave_unit, next_unit, program_share
from vllm_gac.kernels.decode.softmax import add_latent_tile, no_values


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def span_split_kv(
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
    fast_up,
    slow_up,
    fast_pair,
    fast_freq,
    slow_pair,
    slow_freq,
    slow_coefficients,
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
    K: tl.constexpr,
    V: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    GRAIN: tl.constexpr,
    OVERLAP: tl.constexpr,
    REBUILT: tl.constexpr,
    PAIRS: tl.constexpr,
    FAST: tl.constexpr,
    SLOW: tl.constexpr,
    TERMS: tl.constexpr,
    SPAN_TILES: tl.constexpr,
    SLOTS: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):
    """One program: its share of the batch's tiles, unit by unit."""
    if OVERLAP:
        gdc_launch_dependents()  # lets merge() start, and wait, while this kernel ends
    position, end, sequence, before = program_share(
        query_start_loc, seq_lens, programs, multiprocessors, sequences,
        HEADS, SEQUENCES, TILE, WINDOW, LEAST,
    )  # fmt: skip
    # e4m3 converts to fp16 in one instruction for two numbers; to bf16 it takes a dozen.
    fp8: tl.constexpr = kv_cache.dtype.element_ty.primitive_bitwidth == 8
    dtype: tl.constexpr = tl.float16 if fp8 else query.dtype.element_ty
    COLUMNS: tl.constexpr = max(1, TERMS) * SLOTS
    if k_scale is not None:
        scale *= tl.load(k_scale)
    row = tl.arange(0, ROWS)
    row_token, row_head = row // GROUP, row % GROUP
    original = row_head // (GROUP // (PARTS * REBUILT))

    fast = tl.arange(0, FAST)
    fast_frequency = tl.load(fast_freq + fast)
    fast_index = tl.load(fast_pair + fast)
    relative = tl.arange(0, TILE).to(tl.float32)[:, None] * fast_frequency[None, :]
    tile_cos, tile_sin = cos_sin(relative, ASSEMBLY)
    step = fast_frequency * TILE
    step_cos, step_sin = tl.cos(step)[None, :], tl.sin(step)[None, :]

    slow = tl.arange(0, SLOW)
    slow_frequency = tl.load(slow_freq + slow)
    slow_index = tl.load(slow_pair + slow)
    column = tl.arange(0, COLUMNS)
    term, slot = column // SLOTS, column % SLOTS
    slot_token, slot_head = slot // GROUP, slot % GROUP
    slot_original = slot_head // (GROUP // (PARTS * REBUILT))
    span_angle = slow_frequency * (SPAN_TILES * TILE)
    span_cos, span_sin = tl.cos(span_angle)[:, None], tl.sin(span_angle)[:, None]
    HALF: tl.constexpr = SPAN_TILES * TILE / 2
    HELD: tl.constexpr = PARTS * REBUILT

    while position < end:
        unit = next_unit(query_start_loc, seq_lens, position, end, sequence, before, TILE, WINDOW)
        used = row_token < tl.minimum(unit.queries, MAX_QUERIES)
        query_row = unit_rows(
            query, unit, row_token, row_head, query_token_stride, query_head_stride, GROUP
        )
        start = (unit.first + unit.skipped) * TILE
        q_low, q_high = turned_queries(
            query_row, used[:, None], fast_index, fast_frequency, start, scale, PAIRS
        )
        slot_row = unit_rows(
            query, unit, slot_token, slot_head, query_token_stride, query_head_stride, GROUP
        )
        slot_used = slot_token < tl.minimum(unit.queries, MAX_QUERIES)
        coefficient = tl.load(slow_coefficients + term[None, :] * SLOW + slow[:, None])
        turned_low, turned_high = _slow_queries(
            slot_row, slot_used, term, slow_index, slow_frequency, start, HALF, scale, PAIRS
        )
        turned_low, turned_high = turned_low * coefficient, turned_high * coefficient
        row_end = tl.where(used, unit.length - unit.queries + row_token + 1, 0)

        highest = tl.full([ROWS], -1e30, tl.float32)  # finite: a row may see nothing yet
        sums = tl.zeros([TILE, ROWS], tl.float32)  # of weights, over tiles: added up at the end
        acc = no_values(ROWS, V, False)
        table = block_table + sequence.to(tl.int64) * table_stride
        head_cache = kv_cache + (unit.head * cache_head_stride).to(tl.int64) * GRAIN
        token = start + tl.arange(0, TILE)
        page, page_row = locate(token, unit, table, BLOCK_SIZE, WINDOW)
        first_latent = unit.head * PARTS
        first_up = _fast_up(fast_up, unit.head * HELD, FAST, KEY_SIZE, K, dtype)
        second_up = first_up
        if HELD > 1:
            second_up = _fast_up(fast_up, unit.head * HELD + 1, FAST, KEY_SIZE, K, dtype)
        ups = (first_up, second_up)
        for span in tl.range(0, (unit.here + SPAN_TILES - 1) // SPAN_TILES, num_stages=1):
            columns = None
            if TERMS > 0:
                # Zero, but the compiler does not know it: it would move the loads of up-projections
                # out of the loop, and they would then take shared memory all the time.
                span_up = slow_up + tl.minimum(span, 0) * KEY_SIZE
                first = _vectors(
                    turned_low, turned_high, span_up, first_latent, 0, slot_original,
                    REBUILT, SLOW, KEY_SIZE, K, COLUMNS, dtype,
                )  # fmt: skip
                second = first
                if PARTS > 1:
                    second = _vectors(
                        turned_low, turned_high, span_up, first_latent, 1, slot_original,
                        REBUILT, SLOW, KEY_SIZE, K, COLUMNS, dtype,
                    )  # fmt: skip
                columns = (first, second)
                turned_low, turned_high = rotate_back(turned_low, turned_high, span_cos, span_sin)
            for _ in range(tl.minimum(SPAN_TILES, unit.here - span * SPAN_TILES)):
                offset = page.to(tl.int64) * cache_block_stride + page_row * cache_token_stride
                # One step ahead in registers, so that the pipeline's stages are all left to rows.
                page, page_row = locate(token + TILE, unit, table, BLOCK_SIZE, WINDOW)
                cache_row = head_cache + (offset * GRAIN)[:, None]
                place = ((token - start) % (SPAN_TILES * TILE)).to(tl.float32) / HALF - 1
                scores = _scores(
                    q_low, q_high, columns, place, cache_row, ups, original, tile_cos, tile_sin,
                    PARTS, REBUILT, KEY_SIZE, K, FAST, TERMS, SLOTS, TILE, ROWS, dtype, ASSEMBLY,
                )  # fmt: skip
                q_low, q_high = rotate_back(q_low, q_high, step_cos, step_sin)
                highest, sums, acc = add_latent_tile(
                    scores, token, row_end, highest, sums, acc, cache_row + PARTS * KEY_SIZE,
                    V, VALUE_SIZE, WINDOW, dtype, False, ASSEMBLY,
                )  # fmt: skip
                token += TILE

        denominator = tl.sum(sums, 0)
        output_row = unit_rows(
            output, unit, row_token, row_head, output_token_stride, output_head_stride, GROUP
        )
        store_result(
            output_row, partial_values, partial_log_sums, unit, row, used,
            highest, denominator, v_scale, acc, GROUP * MAX_QUERIES, V, VALUE_SIZE,
        )  # fmt: skip
        position, sequence, before = leave_unit(unit, position, sequence, before, HEADS)


@triton.jit
def _slow_queries(
    slot_row, used, term, index, frequency, start, HALF: tl.constexpr, scale, PAIRS: tl.constexpr
):
    """Slow pairs of a unit's queries, rotated backward by the center of the span at `start`.

    [SLOW, COLUMNS]. Odd polynomials make sines, which meet the pairs turned by a right angle: a
    pair (l, h) adds cos (l k_low + h k_high) + sin (h k_low - l k_high).
    """
    odd = (term % 2 == 1)[None, :]
    low_offset = tl.where(odd, PAIRS, 0) + index[:, None]
    high_offset = tl.where(odd, 0, PAIRS) + index[:, None]
    low = tl.load(slot_row[None, :] + low_offset, mask=used[None, :], other=0.0)
    high = tl.load(slot_row[None, :] + high_offset, mask=used[None, :], other=0.0)
    high = high.to(tl.float32) * tl.where(odd, -1.0, 1.0)
    angle = frequency * (start.to(tl.float32) + HALF)
    return rotate_back(
        low.to(tl.float32) * scale, high * scale, tl.cos(angle)[:, None], tl.sin(angle)[:, None]
    )


@triton.jit
def _fast_up(
    fast_up, head, FAST: tl.constexpr, KEY_SIZE: tl.constexpr, K: tl.constexpr, dtype: tl.constexpr
):
    """The fast rows of a head's up-projection, transposed: pieces [K[i], 2 * FAST]."""
    output = tl.arange(0, 2 * FAST)[:, None]
    head_up = fast_up + head * (2 * FAST * KEY_SIZE) + output * KEY_SIZE
    up0 = tl.trans(_columns(head_up, 0, K[0]).to(dtype))
    up1 = up0
    if K[1] > 0:
        up1 = tl.trans(_columns(head_up, K[0], K[1]).to(dtype))
    return up0, up1


@triton.jit
def _columns(rows, START: tl.constexpr, SIZE: tl.constexpr):
    """Columns START..START + SIZE of the rows that `rows` [n, 1] points to."""
    return tl.load(rows + START + tl.arange(0, SIZE)[None, :])


@triton.jit
def _zeros(COLUMNS: tl.constexpr, SIZE: tl.constexpr, dtype: tl.constexpr):
    """Zeros [COLUMNS, SIZE]; of a piece of size 0, which nothing reads, 16 columns."""
    return tl.zeros([COLUMNS, SIZE if SIZE > 0 else 16], dtype)


@triton.jit
def _vectors(
    turned_low,
    turned_high,
    slow_up,
    first_latent,
    part: tl.constexpr,
    original,
    REBUILT: tl.constexpr,
    SLOW: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    K: tl.constexpr,
    COLUMNS: tl.constexpr,
    dtype: tl.constexpr,
):
    """The vectors of a span in the space of one latent: two pieces [K[i], COLUMNS].

    turned_low, turned_high: already times coefficients. Columns of heads that get their keys from
    another latent are 0.
    """
    turned = tl.trans(tl.join(turned_low, turned_high), 0, 2, 1)
    turned = tl.reshape(turned, [2 * SLOW, COLUMNS]).to(tl.float16)
    latent_up = slow_up + (first_latent + part) * REBUILT * 2 * SLOW * KEY_SIZE
    w0, w1 = _zeros(COLUMNS, K[0], tl.float32), _zeros(COLUMNS, K[1], tl.float32)
    for member in tl.static_range(REBUILT):
        head_up = latent_up + member * 2 * SLOW * KEY_SIZE
        rows = head_up + tl.arange(0, 2 * SLOW)[:, None] * KEY_SIZE
        own = tl.where((original == part * REBUILT + member)[None, :], turned, 0.0).to(tl.float16)
        own = tl.trans(own)
        w0 = tl.dot(own, _columns(rows, 0, K[0]), w0)
        if K[1] > 0:
            w1 = tl.dot(own, _columns(rows, K[0], K[1]), w1)
    return tl.trans(w0.to(dtype)), tl.trans(w1.to(dtype))


@triton.jit
def _scores(
    q_low,
    q_high,
    columns,
    place,
    cache_row,
    ups,
    original,
    tile_cos,
    tile_sin,
    PARTS: tl.constexpr,
    REBUILT: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    K: tl.constexpr,
    FAST: tl.constexpr,
    TERMS: tl.constexpr,
    SLOTS: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    dtype: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):
    """Scores [TILE, ROWS] of a unit's queries with a tile's latents.

    q_low, q_high [ROWS, FAST]: queries rotated backward by the position of the tile's first token.
    """
    q = tl.trans(_both_halves(q_low.to(tl.float16), q_high.to(tl.float16)))
    scores = tl.zeros([TILE, ROWS], tl.float32)
    terms = tl.zeros([TILE, max(1, TERMS) * SLOTS], tl.float32)
    for part in tl.static_range(PARTS):
        latent = load_latents(cache_row + part * KEY_SIZE, KEY_SIZE, K, dtype, ASSEMBLY)
        if TERMS > 0:
            terms = tl.dot(latent[0], columns[part][0], terms)
            if K[1] > 0:
                terms = tl.dot(latent[1], columns[part][1], terms)
        for member in tl.static_range(REBUILT):
            up = ups[part * REBUILT + member]
            key = tl.dot(latent[0], up[0])
            if K[1] > 0:
                key = tl.dot(latent[1], up[1], key)
            low, high = tl.split(tl.trans(tl.reshape(key, [TILE, 2, FAST]), 0, 2, 1))
            low, high = rotate(low, high, tile_cos, tile_sin, ASSEMBLY)
            head_scores = tl.dot(_both_halves(low, high), q)
            if part + member > 0:
                # Rows of other heads keep what they have; later heads get their scores later.
                is_own = (original == part * REBUILT + member)[None, :]
                head_scores = tl.where(is_own, head_scores, scores)
            scores = head_scores
    if TERMS > 0:
        slow = _chebyshev_sum(terms, place[:, None], TERMS, SLOTS, TILE)
        if SLOTS < ROWS:
            slow = tl.trans(tl.join(slow, tl.zeros_like(slow)), 0, 2, 1)
            slow = tl.reshape(slow, [TILE, ROWS])
        scores += slow
    return scores


@triton.jit
def _both_halves(low, high):
    """low and high [n, FAST] side by side: [n, 2 * FAST]."""
    both = tl.trans(tl.join(low, high), 0, 2, 1)
    return tl.reshape(both, [low.shape[0], 2 * low.shape[1]])


@triton.jit
def _chebyshev_sum(terms, x, TERMS: tl.constexpr, SLOTS: tl.constexpr, TILE: tl.constexpr):
    """The sum over j of T_j(x) terms[:, j]: [TILE, SLOTS], by Clenshaw's recurrence.

    terms [TILE, TERMS * SLOTS], x [TILE, 1].
    """
    if TERMS == 2:
        t0, t1 = _halves(terms, SLOTS, TILE)
        return t0 + x * t1
    elif TERMS == 4:
        low, high = _halves(terms, 2 * SLOTS, TILE)
        t0, t1 = _halves(low, SLOTS, TILE)
        t2, t3 = _halves(high, SLOTS, TILE)
        b2 = t2 + 2 * x * t3
        b1 = t1 + 2 * x * b2 - t3
        return t0 + x * b1 - b2
    else:
        tl.static_assert(TERMS == 8)
        low, high = _halves(terms, 4 * SLOTS, TILE)
        low0, low1 = _halves(low, 2 * SLOTS, TILE)
        high0, high1 = _halves(high, 2 * SLOTS, TILE)
        t0, t1 = _halves(low0, SLOTS, TILE)
        t2, t3 = _halves(low1, SLOTS, TILE)
        t4, t5 = _halves(high0, SLOTS, TILE)
        t6, t7 = _halves(high1, SLOTS, TILE)
        b6 = t6 + 2 * x * t7
        b5 = t5 + 2 * x * b6 - t7
        b4 = t4 + 2 * x * b5 - b6
        b3 = t3 + 2 * x * b4 - b5
        b2 = t2 + 2 * x * b3 - b4
        b1 = t1 + 2 * x * b2 - b3
        return t0 + x * b1 - b2


@triton.jit
def _halves(x, SIZE: tl.constexpr, TILE: tl.constexpr):
    """x [TILE, 2 * SIZE] cut into its first and last SIZE columns."""
    return tl.split(tl.trans(tl.reshape(x, [TILE, 2, SIZE]), 0, 2, 1))

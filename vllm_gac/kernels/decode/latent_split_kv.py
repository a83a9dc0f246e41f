"""Split-KV decode attention for latent keys (PaLU): the cache holds latents instead of keys.

The tensor cores rebuild a tile's keys from its latents. The keys are then rotated by their
positions relative to the tile's first token, by the same angles in every tile. The queries are
rotated backward by the position of that first token instead: q R(-n0) . R(j) k = q . R(n0 + j) k.
So no table of cosines is read for the tokens.

Scores have tokens along the first dim, as the matrix unit leaves them, so that only the weights are
transposed, of which there are few. Keys are rotated and multiplied in fp16, two elements an
instruction; fp16 is finer than bf16 and holds keys up to 65,504. So the scale of an FP8 cache's
latents goes into the up-projections: keys that codes alone give may be hundreds of times as large.

Names are those of split_kv.py, and these:

    up          [value heads * parts, heads, 2, pairs, key_size]: the up-projections of the keys
    inv_freq    [pairs], fp32: radians per token of each rotary pair

    REBUILT     what a latent is rebuilt to (latent_keys.py: Rebuilt); PADDED is REBUILT.padded

    original    [ROWS]: which of the original KV heads of the unit's latents a row belongs to
    q_low, q_high       [ROWS, PADDED], fp32: low and high halves of the queries' rotary pairs,
                rotated backward by the position of the tile's first token
    tile_cos, tile_sin  [TILE, PADDED]: of the angles of a tile's tokens relative to its first one
    step_cos, step_sin  [1, PADDED]: of the angles from one tile to the next
    sums        [TILE, ROWS]: weights summed over the tiles, to be added up at the end
"""

# ruff: noqa: N803, N806 -- Triton's convention: compile-time constants in capitals.
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from vllm_gac.kernels.cache_write import scale_of
from vllm_gac.kernels.decode.latent_keys import (
    cos_sin,
    derotated_queries,
    load_latent_pairs,
    load_latents,
    rebuild_from_pairs,
    rebuild_keys,
    rotate,
    rotate_back,
)
from vllm_gac.kernels.decode.rows import locate, store_result, unit_rows
from vllm_gac.kernels.decode.schedule import NOT_SPECIALIZED, leave_unit, next_unit, program_share
from vllm_gac.kernels.decode.softmax import add_latent_tile, no_values, value_pieces


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def latent_split_kv(
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
    up,
    inv_freq,
    TILES: tl.constexpr,
    QUERIES: tl.constexpr,
    CACHE: tl.constexpr,
    OVERLAP: tl.constexpr,
    REBUILT: tl.constexpr,
):
    """One program: its share of the batch's tiles, unit by unit."""
    TILE: tl.constexpr = TILES.tile
    ROWS: tl.constexpr = QUERIES.rows
    if OVERLAP:
        gdc_launch_dependents()  # lets merge() start, and wait, while this kernel ends
    position, end, sequence, before = program_share(
        query_start_loc, seq_lens, programs, multiprocessors, sequences, TILES
    )
    # e4m3 converts to fp16 in one instruction for two elements; to bf16 it takes a dozen.
    fp8: tl.constexpr = kv_cache.dtype.element_ty.primitive_bitwidth == 8
    dtype: tl.constexpr = tl.float16 if fp8 else query.dtype.element_ty
    row = tl.arange(0, ROWS)
    row_token, row_head = row // QUERIES.group, row % QUERIES.group
    original = row_head // (QUERIES.group // (CACHE.keys_per_value * REBUILT.heads))
    pair = tl.arange(0, REBUILT.padded)
    frequency = tl.load(inv_freq + pair, mask=pair < REBUILT.pairs, other=0.0)
    relative = tl.arange(0, TILE).to(tl.float32)[:, None] * frequency[None, :]
    tile_cos, tile_sin = cos_sin(relative, CACHE.assembly)
    step_cos, step_sin = tl.cos(frequency * TILE)[None, :], tl.sin(frequency * TILE)[None, :]
    while position < end:
        unit = next_unit(query_start_loc, seq_lens, position, end, sequence, before, TILES)
        used = row_token < tl.minimum(unit.queries, QUERIES.max_query_len)
        query_row = unit_rows(
            query, unit, row_token, row_head, query_token_stride, query_head_stride, QUERIES
        )
        start = (unit.first + unit.skipped) * TILE
        known = used[:, None] & (pair < REBUILT.pairs)[None, :]
        q_low, q_high = derotated_queries(
            query_row, known, pair, frequency, start, scale, REBUILT.pairs
        )
        row_end = tl.where(used, unit.length - unit.queries + row_token + 1, 0)

        row_max = tl.full([ROWS], -1e30, tl.float32)  # finite: a row may see nothing yet
        sums = tl.zeros([TILE, ROWS], tl.float32)  # of weights, over tiles: added up at the end
        acc = no_values(ROWS, CACHE)
        table = block_table + sequence.to(tl.int64) * table_stride
        head_cache = kv_cache + unit.head.to(tl.int64) * cache_head_stride * CACHE.stride_unit
        token = start + tl.arange(0, TILE)
        page, page_row = locate(token, unit, table, CACHE.block_size, TILES.window)
        for _ in range(unit.here):
            offset = page.to(tl.int64) * cache_block_stride + page_row * cache_token_stride
            # One step ahead in registers, so that the pipeline's stages are all left to rows.
            page, page_row = locate(token + TILE, unit, table, CACHE.block_size, TILES.window)
            cache_row = head_cache + (offset * CACHE.stride_unit)[:, None]
            scores = _scores(
                q_low, q_high, cache_row, up, k_scale, unit.head, original, tile_cos, tile_sin,
                CACHE, REBUILT, dtype,
            )  # fmt: skip
            q_low, q_high = rotate_back(q_low, q_high, step_cos, step_sin)
            value_row = cache_row + CACHE.keys_per_value * CACHE.key_size
            row_max, sums, acc = add_latent_tile(
                scores, token, row_end, row_max, sums, acc, value_row, CACHE, TILES.window, dtype
            )
            token += TILE

        row_sum = tl.sum(sums, 0)
        output_row = unit_rows(
            output, unit, row_token, row_head, output_token_stride, output_head_stride, QUERIES
        )
        store_result(
            output_row, partial_values, partial_log_sums, unit, row, used,
            row_max, row_sum, v_scale, value_pieces(acc, CACHE), QUERIES, CACHE,
        )  # fmt: skip
        position, sequence, before = leave_unit(unit, position, sequence, before, TILES)


@triton.jit
def _scores(
    q_low,
    q_high,
    cache_row,
    up,
    k_scale,
    head,
    original,
    tile_cos,
    tile_sin,
    CACHE: tl.constexpr,
    REBUILT: tl.constexpr,
    dtype: tl.constexpr,
):
    """Scores [TILE, ROWS] of a unit's queries with the keys that a tile's latents give.

    q_low, q_high [ROWS, PADDED]: queries rotated backward by the position of the tile's first
    token. up: the up-projections of the unit's latents begin at the first of `head`.
    """
    KEYS_PER_VALUE: tl.constexpr = CACHE.keys_per_value
    HEADS: tl.constexpr = REBUILT.heads
    q_low, q_high = tl.trans(q_low.to(tl.float16)), tl.trans(q_high.to(tl.float16))
    scores = tl.zeros([tile_cos.shape[0], q_low.shape[1]], tl.float32)
    for part in tl.static_range(KEYS_PER_VALUE):
        latent_row = cache_row + part * CACHE.key_size
        key_scale = None
        if k_scale is not None:
            key_scale = scale_of(k_scale, head * KEYS_PER_VALUE + part, CACHE.by_head)
        if CACHE.paired:
            latent = load_latent_pairs(latent_row, CACHE)
        else:
            latent = load_latents(latent_row, CACHE, dtype)
        for member in tl.static_range(HEADS):
            index = (head * KEYS_PER_VALUE + part) * HEADS + member
            up_head = up + index * 2 * REBUILT.pairs * CACHE.key_size
            if CACHE.paired:
                low, high = rebuild_from_pairs(latent, up_head, key_scale, CACHE, REBUILT)
            else:
                low, high = rebuild_keys(latent, up_head, key_scale, CACHE, REBUILT)
            low, high = rotate(low, high, tile_cos, tile_sin, CACHE.assembly)
            head_scores = tl.dot(low, q_low)
            head_scores = tl.dot(high, q_high, head_scores)
            if part + member > 0:
                # Rows of other heads keep what they have; later heads get their scores later.
                is_own = (original == part * HEADS + member)[None, :]
                head_scores = tl.where(is_own, head_scores, scores)
            scores = head_scores
    return scores

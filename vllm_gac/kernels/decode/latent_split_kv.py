"""Split-KV decode attention for latent keys (PaLU): the cache holds latents instead of keys.

The tensor cores rebuild a tile's keys from its latents. The keys are then rotated by their
positions relative to the tile's first token, by the same angles in every tile. The queries are
rotated backward by the position of that first token instead: q R(-n0) . R(j) k = q . R(n0 + j) k.
So no table of cosines is read for the tokens.

Scores have tokens along the first dim, as the matrix unit leaves them, so that only the weights are
transposed, of which there are few. Keys are rotated and multiplied in fp16, two elements an
instruction; fp16 is finer than bf16 and holds keys up to 65,504.

Names are those of split_kv.py, and these:

    up          [HEADS * PARTS, REBUILT, 2, PAIRS, KEY_SIZE]: the up-projections of the keys
    inv_freq    [PAIRS], fp32: radians per token of each rotary pair

    PARTS       latents of one value head
    KEY_SIZE    elements of one latent; K are the sizes of its pieces
    REBUILT     original KV heads that one latent gives keys to
    PAIRS       rotary pairs of a head: half its size
    PADDED      PAIRS rounded up to a power of two

    original    [ROWS]: which of the unit's PARTS * REBUILT original KV heads a row belongs to
    q_low, q_high       [ROWS, PADDED], fp32: low and high halves of the queries' rotary pairs,
                rotated backward by the position of the tile's first token
    tile_cos, tile_sin  [TILE, PADDED]: of the angles of a tile's tokens relative to its first one
    step_cos, step_sin  [1, PADDED]: of the angles from one tile to the next
    sums        [TILE, ROWS]: weights summed over the tiles, to be added up at the end
"""

# ruff: noqa: N803 -- Triton's convention: compile-time constants in capitals.
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

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
    REBUILT: tl.constexpr,
    PAIRS: tl.constexpr,
    PADDED: tl.constexpr,
):
    """One program: its share of the batch's tiles, unit by unit.

    A row holds PARTS latents, of which each gives the keys of REBUILT original heads, PAIRS
    rotary pairs each: up [HEADS * PARTS, REBUILT, 2, PAIRS, KEY_SIZE].
    """
    if OVERLAP:
        gdc_launch_dependents()  # lets merge() start, and wait, while this kernel ends
    position, end, sequence, before = program_share(
        query_start_loc, seq_lens, programs, multiprocessors, sequences,
        HEADS, SEQUENCES, TILE, WINDOW, MIN_TILES,
    )  # fmt: skip
    # e4m3 converts to fp16 in one instruction for two elements; to bf16 it takes a dozen.
    fp8: tl.constexpr = kv_cache.dtype.element_ty.primitive_bitwidth == 8
    dtype: tl.constexpr = tl.float16 if fp8 else query.dtype.element_ty
    if k_scale is not None and not BY_HEAD:
        scale *= tl.load(k_scale)
    row = tl.arange(0, ROWS)
    row_token, row_head = row // GROUP, row % GROUP
    original = row_head // (GROUP // (PARTS * REBUILT))
    pair = tl.arange(0, PADDED)
    frequency = tl.load(inv_freq + pair, mask=pair < PAIRS, other=0.0)
    relative = tl.arange(0, TILE).to(tl.float32)[:, None] * frequency[None, :]
    tile_cos, tile_sin = cos_sin(relative, ASSEMBLY)
    step_cos, step_sin = tl.cos(frequency * TILE)[None, :], tl.sin(frequency * TILE)[None, :]
    while position < end:
        unit = next_unit(query_start_loc, seq_lens, position, end, sequence, before, TILE, WINDOW)
        used = row_token < tl.minimum(unit.queries, MAX_QUERIES)
        query_row = unit_rows(
            query, unit, row_token, row_head, query_token_stride, query_head_stride, GROUP
        )
        start = (unit.first + unit.skipped) * TILE
        known = used[:, None] & (pair < PAIRS)[None, :]
        row_scale = scale
        if BY_HEAD:
            key_head = unit.head * PARTS + original // REBUILT
            row_scale = (scale * tl.load(k_scale + key_head))[:, None]
        q_low, q_high = derotated_queries(
            query_row, known, pair, frequency, start, row_scale, PAIRS
        )
        row_end = tl.where(used, unit.length - unit.queries + row_token + 1, 0)

        row_max = tl.full([ROWS], -1e30, tl.float32)  # finite: a row may see nothing yet
        sums = tl.zeros([TILE, ROWS], tl.float32)  # of weights, over tiles: added up at the end
        acc = no_values(ROWS, V, PAIRED)
        table = block_table + sequence.to(tl.int64) * table_stride
        head_cache = kv_cache + unit.head.to(tl.int64) * cache_head_stride * STRIDE_UNIT
        token = start + tl.arange(0, TILE)
        page, page_row = locate(token, unit, table, BLOCK_SIZE, WINDOW)
        for _ in range(unit.here):
            offset = page.to(tl.int64) * cache_block_stride + page_row * cache_token_stride
            # One step ahead in registers, so that the pipeline's stages are all left to rows.
            page, page_row = locate(token + TILE, unit, table, BLOCK_SIZE, WINDOW)
            cache_row = head_cache + (offset * STRIDE_UNIT)[:, None]
            scores = _scores(
                q_low, q_high, cache_row, up, unit.head, original, tile_cos, tile_sin,
                PARTS, REBUILT, KEY_SIZE, K, PAIRS, PADDED, TILE, ROWS, dtype, PAIRED, ASSEMBLY,
            )  # fmt: skip
            q_low, q_high = rotate_back(q_low, q_high, step_cos, step_sin)
            row_max, sums, acc = add_latent_tile(
                scores, token, row_end, row_max, sums, acc, cache_row + PARTS * KEY_SIZE,
                V, VALUE_SIZE, WINDOW, dtype, PAIRED, ASSEMBLY,
            )  # fmt: skip
            token += TILE

        row_sum = tl.sum(sums, 0)
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
def _scores(
    q_low,
    q_high,
    cache_row,
    up,
    head,
    original,
    tile_cos,
    tile_sin,
    PARTS: tl.constexpr,
    REBUILT: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    K: tl.constexpr,
    PAIRS: tl.constexpr,
    PADDED: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    dtype: tl.constexpr,
    PAIRED: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):
    """Scores [TILE, ROWS] of a unit's queries with the keys that a tile's latents give.

    q_low, q_high [ROWS, PADDED]: queries rotated backward by the position of the tile's first
    token. up: the up-projections of the unit's latents begin at `head` * PARTS * REBUILT heads.
    """
    q_low, q_high = tl.trans(q_low.to(tl.float16)), tl.trans(q_high.to(tl.float16))
    scores = tl.zeros([TILE, ROWS], tl.float32)
    for part in tl.static_range(PARTS):
        latent_row = cache_row + part * KEY_SIZE
        if PAIRED:
            latent = load_latent_pairs(latent_row, KEY_SIZE, K, ASSEMBLY)
        else:
            latent = load_latents(latent_row, KEY_SIZE, K, dtype, ASSEMBLY)
        for member in tl.static_range(REBUILT):
            up_head = up + ((head * PARTS + part) * REBUILT + member) * 2 * PAIRS * KEY_SIZE
            if PAIRED:
                low, high = rebuild_from_pairs(latent, up_head, PAIRS, PADDED, KEY_SIZE, K)
            else:
                low, high = rebuild_keys(latent, up_head, PAIRS, PADDED, KEY_SIZE, K)
            low, high = rotate(low, high, tile_cos, tile_sin, ASSEMBLY)
            head_scores = tl.dot(low, q_low)
            head_scores = tl.dot(high, q_high, head_scores)
            if part + member > 0:
                # Rows of other heads keep what they have; later heads get their scores later.
                is_own = (original == part * REBUILT + member)[None, :]
                head_scores = tl.where(is_own, head_scores, scores)
            scores = head_scores
    return scores

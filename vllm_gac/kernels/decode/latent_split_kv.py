"""Split-KV attention whose keys are rebuilt from cached latents (PaLU) and rotated on the fly.

A tile's keys are rebuilt by tensor cores, rotated by their positions relative to the tile's first
token, which are the same for every tile, and met by queries that are rotated backwards by the
tile's own position: q R(-n0) . R(j) k = q . R(n0 + j) k. No table is read per token.

Scores keep tokens along the first dim, as the matrix unit leaves them: nothing is transposed but
the few weights. Keys are rotated and met in fp16, two numbers an instruction, which is finer than
bf16 and holds keys up to 65,504.
"""

# ruff: noqa: N803 -- Triton's convention: compile-time constants in capitals.
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
    REBUILT: tl.constexpr,
    PAIRS: tl.constexpr,
    PADDED: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):
    """One program: its share of the batch's tiles, unit by unit.

    A row holds PARTS latents, of which each gives the keys of REBUILT original heads, PAIRS
    rotary pairs each: up [HEADS * PARTS, REBUILT, 2, PAIRS, KEY_SIZE].
    """
    if OVERLAP:
        gdc_launch_dependents()  # lets merge() start, and wait, while this kernel ends
    counts = tile_counts(query_start_loc, seq_lens, sequences, SEQUENCES, TILE, WINDOW)
    share, total = tiles_per_program(counts, programs, multiprocessors, HEADS, LEAST)
    position = tl.program_id(0) * share
    end = tl.minimum(position + share, total)
    index = tl.arange(0, SEQUENCES)
    sequence = tl.sum((tl.cumsum(counts, 0) * HEADS <= position).to(tl.int32))
    before = tl.sum(tl.where(index < sequence, counts, 0)) * HEADS  # tiles of earlier sequences

    if k_scale is not None:
        scale *= tl.load(k_scale)
    row = tl.arange(0, ROWS)
    row_token, row_head = row // GROUP, row % GROUP
    original = row_head // (GROUP // (PARTS * REBUILT))  # of the unit's original KV heads
    pair = tl.arange(0, PADDED)
    frequency = tl.load(inv_freq + pair, mask=pair < PAIRS, other=0.0)
    relative = tl.arange(0, TILE).to(tl.float32)[:, None] * frequency[None, :]
    tile_cos, tile_sin = _cos_sin(relative, ASSEMBLY)
    step_cos, step_sin = tl.cos(frequency * TILE)[None, :], tl.sin(frequency * TILE)[None, :]
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
        mask = used[:, None] & (pair < PAIRS)[None, :]
        q_low = tl.load(query_row[:, None] + pair[None, :], mask=mask, other=0.0)
        q_high = tl.load(query_row[:, None] + PAIRS + pair[None, :], mask=mask, other=0.0)
        # e4m3 converts to fp16 in one instruction for two numbers; to bf16 it takes a dozen.
        fp8: tl.constexpr = kv_cache.dtype.element_ty.primitive_bitwidth == 8
        dtype: tl.constexpr = tl.float16 if fp8 else query.dtype.element_ty
        angle = frequency * ((first + skipped) * TILE).to(tl.float32)
        q_low, q_high = _rotate_back(
            q_low.to(tl.float32) * scale,
            q_high.to(tl.float32) * scale,
            tl.cos(angle)[None, :],
            tl.sin(angle)[None, :],
        )
        row_end = tl.where(used, length - queries + row_token + 1, 0)  # tokens a row sees, absolute

        highest = tl.full([ROWS], -1e30, tl.float32)  # finite: a row may see nothing yet
        sums = tl.zeros([TILE, ROWS], tl.float32)  # of weights, over tiles: added up at the end
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
            met_low, met_high = tl.trans(q_low.to(tl.float16)), tl.trans(q_high.to(tl.float16))
            scores = tl.zeros([TILE, ROWS], tl.float32)
            for part in tl.static_range(PARTS):
                part_row = cache_row + part * KEY_SIZE
                latent0 = cache_piece(part_row, 0, K0, KEY_SIZE).to(dtype)
                latent0 = _in_registers(latent0, ASSEMBLY)
                if K1 > 0:
                    latent1 = cache_piece(part_row, K0, K1, KEY_SIZE).to(dtype)
                    latent1 = _in_registers(latent1, ASSEMBLY)
                if K2 > 0:
                    latent2 = cache_piece(part_row, K0 + K1, K2, KEY_SIZE).to(dtype)
                    latent2 = _in_registers(latent2, ASSEMBLY)
                for member in tl.static_range(REBUILT):
                    up_head = up + ((head * PARTS + part) * REBUILT + member) * 2 * PAIRS * KEY_SIZE
                    key = tl.dot(
                        latent0, _up_piece(up_head, PAIRS, PADDED, 0, K0, KEY_SIZE).to(dtype)
                    )
                    if K1 > 0:
                        piece = _up_piece(up_head, PAIRS, PADDED, K0, K1, KEY_SIZE).to(dtype)
                        key = tl.dot(latent1, piece, key)
                    if K2 > 0:
                        piece = _up_piece(up_head, PAIRS, PADDED, K0 + K1, K2, KEY_SIZE).to(dtype)
                        key = tl.dot(latent2, piece, key)
                    low, high = tl.split(tl.trans(tl.reshape(key, [TILE, 2, PADDED]), 0, 2, 1))
                    low16, high16 = _rotate(low, high, tile_cos, tile_sin, ASSEMBLY)
                    met = tl.dot(low16, met_low)
                    met = tl.dot(high16, met_high, met)
                    # Rows of the heads to come get theirs later.
                    if part + member > 0:
                        met = tl.where((original == part * REBUILT + member)[None, :], met, scores)
                    scores = met
            q_low, q_high = _rotate_back(q_low, q_high, step_cos, step_sin)
            visible = token[:, None] < row_end[None, :]
            if WINDOW > 0:
                visible &= token[:, None] >= row_end[None, :] - WINDOW
            scores = tl.where(visible, scores, float("-inf"))

            higher = tl.maximum(highest, tl.max(scores, 0))
            shrink = tl.exp2(highest - higher)[None, :]
            highest = higher
            weights = tl.exp2(scores - higher[None, :])
            sums = sums * shrink + weights
            weights = tl.trans(weights.to(dtype))
            shrinking = tl.reshape(shrink, [ROWS, 1])
            value_row = cache_row + PARTS * KEY_SIZE
            v0 = cache_piece(value_row, 0, V0, VALUE_SIZE)
            acc0 = tl.dot(weights, v0.to(dtype), acc0 * shrinking)
            if V1 > 0:
                v1 = cache_piece(value_row, V0, V1, VALUE_SIZE)
                acc1 = tl.dot(weights, v1.to(dtype), acc1 * shrinking)
            if V2 > 0:
                v2 = cache_piece(value_row, V0 + V1, V2, VALUE_SIZE)
                acc2 = tl.dot(weights, v2.to(dtype), acc2 * shrinking)
            token += TILE

        denominator = tl.sum(sums, 0)
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
def _cos_sin(angle, ASSEMBLY: tl.constexpr):
    """In fp16, of angles of no more than a tile's tokens: exact enough as the hardware gives it."""
    if ASSEMBLY:
        cos, sin = tl.inline_asm_elementwise(
            "cos.approx.ftz.f32 $0, $2; sin.approx.ftz.f32 $1, $2;",
            "=&f,=f,f",
            [angle],
            dtype=(tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
    else:
        cos, sin = tl.cos(angle), tl.sin(angle)
    return cos.to(tl.float16), sin.to(tl.float16)


@triton.jit
def _rotate(low, high, cos, sin, ASSEMBLY: tl.constexpr):
    """Rotate pairs (low, high) forward, fp32 in and fp16 out, two at a time."""
    if ASSEMBLY:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 l, h, t, u;
            cvt.rn.f16x2.f32 l, $3, $2;
            cvt.rn.f16x2.f32 h, $5, $4;
            mul.rn.f16x2 t, h, $7;
            neg.f16x2 t, t;
            mul.rn.f16x2 u, l, $7;
            fma.rn.f16x2 $0, l, $6, t;
            fma.rn.f16x2 $1, h, $6, u;
            }""",
            "=&r,=&r,f,f,f,f,r,r",
            [low, high, cos, sin],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        low, high = low.to(tl.float16), high.to(tl.float16)
        return low * cos - high * sin, high * cos + low * sin


@triton.jit
def _rotate_back(low, high, cos, sin):
    return low * cos + high * sin, high * cos - low * sin


@triton.jit
def _in_registers(x, ASSEMBLY: tl.constexpr):
    """x as it is, but in registers.

    Hopper's matrix unit could read it where it was staged, and would hold on to one stage more:
    without that, two programs fit on a multiprocessor.
    """
    if ASSEMBLY:
        return tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=True, pack=2
        )
    else:
        return x


@triton.jit
def _up_piece(
    up_head,
    PAIRS: tl.constexpr,
    PADDED: tl.constexpr,
    START: tl.constexpr,
    SIZE: tl.constexpr,
    KEY_SIZE: tl.constexpr,
):
    """Columns START.. of one head's up-projection, transposed: [SIZE, 2 PADDED], low half first."""
    output = tl.arange(0, 2 * PADDED)
    half, pair = output // PADDED, output % PADDED
    column = START + tl.arange(0, SIZE)
    mask = (pair < PAIRS)[:, None] & (column < KEY_SIZE)[None, :]
    offset = (half * PAIRS + pair)[:, None] * KEY_SIZE + column[None, :]
    return tl.trans(tl.load(up_head + offset, mask=mask, other=0.0))

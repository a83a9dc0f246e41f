"""Decode attention over latent keys: the served kernel against one with fewer waits a token.

    python -m benchmarks.kernels.latent_rebuild [OUT.jsonl]

Prints a JSON line a case and kernel, and appends it to OUT.jsonl if that is given: microseconds,
`ratio` (served / this), `roofline` (reading the cache once at the copy bandwidth / this) and the
relative error against fp32 on two sequences. It ends with status 1 if an error is above .5 %. It
takes about 60 s of an H200.

What limits the served kernel: 64 tokens of one KV head take 1,060 to 1,210 cycles of a
multiprocessor (8 latents of 64, 64 x 4,096 tokens, 158.6 us). Matrix units need 256 of them for the
rebuild, about 128 for the scores and 52 for the values; reading takes 480; the warps issue in 27 %
of the cycles. So none of these is the limit: a program waits 15 times for each 64 tokens, for 8
products and at 7 barriers, one after the other, and two programs hide too little of it.

FP8 products shorten one wait of four, and need two for fp16's error (docs/decisions.md).
Rotating the query in place of the key costs more. With rank r and P pairs, a token's key of one KV
head takes 2 P r multiply-adds to rebuild and 4 P to rotate. A query folded into the up-projection,
for cosines and sines apart, takes 2 P r and 2 P, but for each of the 4 query heads of a KV head.

The variant has half the waits and barriers for a token (SASS of Triton 3.6, FP8: 8 products and 7
barriers for 128 tokens), none of the registers spilled in the loop:

    one product in place of two for the even and the odd columns of an FP8 latent: columns may be in
    any order if those of the up-projection are, too
    one product in place of two for the low and the high halves of the rotary pairs
    two subtiles of 64 tokens in a step share a softmax, its barriers, and the barrier after which
    the matrix unit sees the rotated queries
    the up-projections are loaded before the loop. Triton 3.9 keeps those that are loaded inside it
    in registers, and stores them to shared memory again for every tile
"""

# ruff: noqa: N803, N806 -- Triton's convention: compile-time constants in capitals.
import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from benchmarks.common.json_lines import append_line
from vllm_gac.kernels.decode import launch
from vllm_gac.kernels.decode.byte_pairs import even_and_odd
from vllm_gac.kernels.decode.latent_keys import (
    cos_sin,
    derotated_queries,
    load_latents,
    rotate,
    rotate_back,
)
from vllm_gac.kernels.decode.rows import locate, store_result, unit_rows
from vllm_gac.kernels.decode.schedule import NOT_SPECIALIZED, leave_unit, next_unit, program_share
from vllm_gac.kernels.decode.softmax import (
    accumulate_values,
    no_values,
    online_softmax,
    value_pieces,
    visible_scores,
)
from vllm_gac.kernels.decode.tiling import Tiling, tiling_of
from vllm_gac.kernels.on_all_cores import compiling_on_all_cores
from vllm_gac.layout.cache_geometry import CacheGeometry
from vllm_gac.profiling.decode_batch import DecodeBatch
from vllm_gac.profiling.timing import copy_bandwidth, microseconds, warm_up

SUBTILE = tl.constexpr(64)
BATCHES = ((64, 4096), (64, 1250))
RANKS = (64, 32)
DTYPES = {"fp8": torch.float8_e4m3fn, "bf16": torch.bfloat16}
MAX_ERROR = 5e-3


@triton.jit(do_not_specialize=NOT_SPECIALIZED)
def rebuilt_split_kv(
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
    """As latent_split_kv, for two latents of one power of two a value head, one scale for all.

    A tile is one subtile of 64 tokens, or two.
    """
    tl.static_assert(CACHE.keys_per_value * REBUILT.heads == 2 and not CACHE.by_head)
    tl.static_assert(CACHE.key_pieces[0] == CACHE.key_size)
    TWO: tl.constexpr = TILES.tile == 2 * SUBTILE
    ROWS: tl.constexpr = QUERIES.rows
    if OVERLAP:
        gdc_launch_dependents()
    position, end, sequence, before = program_share(
        query_start_loc, seq_lens, programs, multiprocessors, sequences, TILES
    )
    fp8: tl.constexpr = kv_cache.dtype.element_ty.primitive_bitwidth == 8
    dtype: tl.constexpr = tl.float16 if fp8 else query.dtype.element_ty
    if k_scale is not None:
        scale *= tl.load(k_scale)
    row = tl.arange(0, ROWS)
    row_token, row_head = row // QUERIES.group, row % QUERIES.group
    is_second = (row_head >= QUERIES.group // 2)[None, :]
    pair = tl.arange(0, REBUILT.padded)
    frequency = tl.load(inv_freq + pair, mask=pair < REBUILT.pairs, other=0.0)
    relative = tl.arange(0, SUBTILE).to(tl.float32)[:, None] * frequency[None, :]
    cos, sin = cos_sin(relative, CACHE.assembly)
    step_cos, step_sin = tl.cos(frequency * SUBTILE)[None, :], tl.sin(frequency * SUBTILE)[None, :]
    while position < end:
        unit = next_unit(query_start_loc, seq_lens, position, end, sequence, before, TILES)
        used = row_token < tl.minimum(unit.queries, QUERIES.max_query_len)
        query_row = unit_rows(
            query, unit, row_token, row_head, query_token_stride, query_head_stride, QUERIES
        )
        start = (unit.first + unit.skipped) * TILES.tile
        known = used[:, None] & (pair < REBUILT.pairs)[None, :]
        q_low, q_high = derotated_queries(
            query_row, known, pair, frequency, start, scale, REBUILT.pairs
        )
        row_end = tl.where(used, unit.length - unit.queries + row_token + 1, 0)
        up0 = _up(up, 2 * unit.head, CACHE, REBUILT, dtype)
        up1 = _up(up, 2 * unit.head + 1, CACHE, REBUILT, dtype)

        row_max = tl.full([ROWS], -1e30, tl.float32)
        sums = tl.zeros([SUBTILE, ROWS], tl.float32)
        acc = no_values(ROWS, CACHE)
        table = block_table + sequence.to(tl.int64) * table_stride
        head_cache = kv_cache + unit.head.to(tl.int64) * cache_head_stride * CACHE.stride_unit
        token = start + tl.arange(0, SUBTILE)
        page, page_row = locate(token, unit, table, CACHE.block_size, TILES.window)
        page1, page_row1 = page, page_row
        if TWO:
            page1, page_row1 = locate(token + SUBTILE, unit, table, CACHE.block_size, TILES.window)
        for _ in range(unit.here):
            offset = page.to(tl.int64) * cache_block_stride + page_row * cache_token_stride
            cache_row = head_cache + (offset * CACHE.stride_unit)[:, None]
            offset1 = page1.to(tl.int64) * cache_block_stride + page_row1 * cache_token_stride
            cache_row1 = head_cache + (offset1 * CACHE.stride_unit)[:, None]
            following = token + TILES.tile
            page, page_row = locate(following, unit, table, CACHE.block_size, TILES.window)
            if TWO:
                page1, page_row1 = locate(
                    following + SUBTILE, unit, table, CACHE.block_size, TILES.window
                )

            q = _query(q_low, q_high)
            q_low, q_high = rotate_back(q_low, q_high, step_cos, step_sin)
            if TWO:
                q1 = _query(q_low, q_high)
                q_low, q_high = rotate_back(q_low, q_high, step_cos, step_sin)
            scores = _scores(q, cache_row, up0, up1, is_second, cos, sin, CACHE, dtype)
            scores = visible_scores(scores, token, row_end, 0, TILES.window)
            highest = scores
            if TWO:
                scores1 = _scores(q1, cache_row1, up0, up1, is_second, cos, sin, CACHE, dtype)
                scores1 = visible_scores(scores1, token + SUBTILE, row_end, 0, TILES.window)
                highest = tl.maximum(scores, scores1)
            _, rescale, row_max = online_softmax(highest, row_max, 0)
            weights = tl.exp2(scores - row_max[None, :])
            sums = sums * rescale[None, :] + weights
            rescale = tl.reshape(rescale[None, :], [ROWS, 1])
            value_row = cache_row + CACHE.keys_per_value * CACHE.key_size
            weights = tl.trans(weights.to(dtype))
            if TWO:
                weights1 = tl.exp2(scores1 - row_max[None, :])
                sums += weights1
                weights1 = tl.trans(weights1.to(dtype))
            acc = accumulate_values(acc, weights, rescale, value_row, CACHE)
            if TWO:
                value_row = cache_row1 + CACHE.keys_per_value * CACHE.key_size
                acc = accumulate_values(acc, weights1, 1.0, value_row, CACHE)
            token = following

        output_row = unit_rows(
            output, unit, row_token, row_head, output_token_stride, output_head_stride, QUERIES
        )
        store_result(
            output_row, partial_values, partial_log_sums, unit, row, used,
            row_max, tl.sum(sums, 0), v_scale, value_pieces(acc, CACHE), QUERIES, CACHE,
        )  # fmt: skip
        position, sequence, before = leave_unit(unit, position, sequence, before, TILES)


@triton.jit
def _up(up, head, CACHE: tl.constexpr, REBUILT: tl.constexpr, dtype: tl.constexpr):
    """An up-projection, [key_size, 2 * padded], its rows in the order of _latent's columns."""
    SIZE: tl.constexpr = CACHE.key_size
    output = tl.arange(0, 2 * REBUILT.padded)
    half, pair = output // REBUILT.padded, output % REBUILT.padded
    row = up + (head * 2 * REBUILT.pairs + half * REBUILT.pairs + pair) * SIZE
    mask = (pair < REBUILT.pairs)[:, None]
    piece = tl.load(row[:, None] + tl.arange(0, SIZE)[None, :], mask=mask, other=0.0).to(dtype)
    if CACHE.paired:
        pairs = tl.reshape(piece, [2 * REBUILT.padded, SIZE // 2, 2])
        piece = tl.reshape(tl.trans(pairs, 0, 2, 1), [2 * REBUILT.padded, SIZE])
    return tl.trans(piece)


@triton.jit
def _latent(latent_row, CACHE: tl.constexpr, dtype: tl.constexpr):
    """Latents [SUBTILE, key_size]; of an FP8 cache the even columns, and then the odd ones."""
    SIZE: tl.constexpr = CACHE.key_size
    if CACHE.paired:
        even, odd = even_and_odd(latent_row, 0, SIZE, SIZE, CACHE.assembly)
        return _side_by_side(even, odd)
    else:
        return load_latents(latent_row, CACHE, dtype)[0]


@triton.jit
def _side_by_side(left, right):
    """[left | right], two matrices of the same shape."""
    both = tl.trans(tl.join(left, right), 0, 2, 1)
    return tl.reshape(both, [left.shape[0], 2 * left.shape[1]])


@triton.jit
def _query(q_low, q_high):
    """Queries [2 * padded, ROWS] in fp16."""
    return tl.trans(_side_by_side(q_low.to(tl.float16), q_high.to(tl.float16)))


@triton.jit
def _scores(q, cache_row, up0, up1, is_second, cos, sin, CACHE: tl.constexpr, dtype: tl.constexpr):
    """Scores [SUBTILE, ROWS] of the rows, each with the keys of its own of the two heads."""
    first = _head_scores(q, cache_row, up0, cos, sin, CACHE, dtype)
    second = _head_scores(q, cache_row + CACHE.key_size, up1, cos, sin, CACHE, dtype)
    return tl.where(is_second, second, first)


@triton.jit
def _head_scores(q, latent_row, up, cos, sin, CACHE: tl.constexpr, dtype: tl.constexpr):
    key = tl.dot(_latent(latent_row, CACHE, dtype), up)
    key = tl.trans(tl.reshape(key, [key.shape[0], 2, key.shape[1] // 2]), 0, 2, 1)
    low, high = tl.split(key)
    low, high = rotate(low, high, cos, sin, CACHE.assembly)
    return tl.dot(_side_by_side(low, high), q)


@dataclass(frozen=True, slots=True)
class Shape:
    """A tiling of a kernel.

    Attributes:
        tile: Tokens of a step, 64 or 128.
        stages: Of the software pipeline.
        programs: For each multiprocessor.
    """

    tile: int
    stages: int
    programs: int


# The up-projections take 32 KB; a subtile takes 16 KB in FP8 and 32 KB in bf16.
SHAPES = {
    "fp8": (Shape(64, 3, 2), Shape(128, 2, 2), Shape(128, 3, 2)),
    "bf16": (Shape(64, 3, 2), Shape(128, 2, 2), Shape(128, 3, 1)),
}


def geometry_of(rank: int) -> CacheGeometry:
    """Llama-3-8B's heads with 8 latents of `rank` and 4 values of 128."""
    return CacheGeometry(32, 128, 8, rank, 4, 128)


@contextmanager
def variant(shape: Shape) -> Iterator[None]:
    """Within it, decode_attention runs the variant with this tiling for latent keys."""

    def tiling(geometry: CacheGeometry, queries: int, itemsize: int, *_: object) -> Tiling:
        return replace(
            tiling_of(geometry, queries, itemsize, 1),
            tile=shape.tile, warps=4, stages=shape.stages,
            programs_per_multiprocessor=shape.programs, min_tiles=4 * 64 // shape.tile,
        )  # fmt: skip

    kernel = patch.object(launch, "latent_split_kv", rebuilt_split_kv)
    with kernel, patch.object(launch, "_tiling", tiling):
        yield


def main() -> None:
    """Compile, check and measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, nargs="?", metavar="OUT.jsonl")
    options = parser.parse_args()
    _compile()
    warm_up()
    bandwidth = copy_bandwidth()
    wrong = False
    for name in DTYPES:
        for sequences, context in BATCHES:
            for rank in RANKS:
                for row in _rows(name, sequences, context, rank, bandwidth):
                    print(json.dumps(row), flush=True)
                    if options.out:
                        append_line(options.out, row)
                    wrong |= not row.get("error", 0.0) < MAX_ERROR
    sys.exit(int(wrong))


def _compile() -> None:
    with compiling_on_all_cores():
        for name, dtype in DTYPES.items():
            for rank in RANKS:
                batch = _batch(rank, 64, 64, dtype, only_compiled=True)
                for shape in SHAPES[name]:
                    with variant(shape):
                        batch.gac(only_compile=True)
                batch.gac(only_compile=True)


def _batch(
    rank: int, sequences: int, context: int, dtype: torch.dtype, only_compiled: bool = False
) -> DecodeBatch:
    return DecodeBatch(
        geometry_of(rank), sequences, context, dtype=dtype, head_dim=128,
        only_compiled=only_compiled,
    )  # fmt: skip


def _rows(
    name: str, sequences: int, context: int, rank: int, bandwidth: float
) -> Iterator[dict[str, Any]]:
    """The served kernel, then the variant by each of its tilings."""
    batch = _batch(rank, sequences, context, DTYPES[name])
    case = {"cache": name, "rank": rank, "sequences": sequences, "context": context}
    reading = batch.bytes / bandwidth / 1e6
    served = microseconds(batch.gac, batch.calls)
    yield case | {
        "kernel": "served", "us": round(served, 1), "ratio": 1.0,
        "roofline": round(reading / served, 3), "error": round(batch.gac_error(), 5),
    }  # fmt: skip
    for shape in SHAPES[name]:
        row = case | {
            "kernel": "variant", "tile": shape.tile, "stages": shape.stages,
            "programs": shape.programs,
        }  # fmt: skip
        with variant(shape):
            batch.scratch = launch.decode_scratch(
                batch.geometry, 1, batch.query.device, batch.latent
            )
            try:
                error = batch.gac_error()
                us = microseconds(batch.gac, batch.calls)
            except triton.runtime.errors.OutOfResources as problem:
                yield row | {"refused": str(problem)}
                continue
        yield row | {
            "us": round(us, 1), "ratio": round(served / us, 3),
            "roofline": round(reading / us, 3), "error": round(error, 5),
        }  # fmt: skip


if __name__ == "__main__":
    main()

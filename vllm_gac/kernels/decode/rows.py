"""Rows in device memory: of queries, of the paged cache, of results. Device functions."""

# ruff: noqa: N803, N806 -- Triton's convention: compile-time constants in capitals.
from typing import NamedTuple

import triton
import triton.language as tl

from vllm_gac.kernels.cache_write import scale_of


class Queries(NamedTuple):
    """The queries of a unit. All fields are compile-time constants.

    group: query heads of one value head. max_query_len: query tokens of a sequence, at most. rows:
    group * max_query_len, rounded up to a power of two that tensor cores take.
    """

    group: int
    max_query_len: int
    rows: int


class CacheRow(NamedTuple):
    """A row of the cache, and how it is read. All fields are compile-time constants.

    keys_per_value: key heads, or latents, of a value head. key_size: elements of each. value_size:
    those of the value. key_pieces, value_pieces: sizes of the three pieces of the keys (of one
    latent) and of the value. block_size: tokens of a page. stride_unit: 16 or 8 if all strides of
    the cache are multiples of it, else 1: the compiler then knows how rows are aligned. paired:
    whether two columns of an fp8 cache are read as one number (byte_pairs.py). by_head: whether
    each head has a scale. assembly: whether the GPU's own instructions may be used; not in
    Triton's interpreter.
    """

    keys_per_value: int
    key_size: int
    value_size: int
    key_pieces: tuple[int, int, int]
    value_pieces: tuple[int, int, int]
    block_size: int
    stride_unit: int
    paired: bool
    by_head: bool
    assembly: bool


@triton.jit
def unit_rows(tensor, unit, row_token, row_head, token_stride, head_stride, QUERIES: tl.constexpr):
    """Pointers [ROWS] to a unit's rows in `tensor`, which is [tokens, query_heads, size].

    row_token, row_head [ROWS]: of each row the query token among the sequence's, and the query head
    among the value head's.
    """
    token = (unit.query_start + row_token).to(tl.int64) * token_stride
    return tensor + token + (unit.head * QUERIES.group + row_head) * head_stride


@triton.jit
def locate(token, unit, table, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr):
    """Page, and row in it, of every token of a tile, both [TILE].

    For a token that no query sees, those of the nearest one that some query sees: memory that was
    never written could hold NaN, and NaN times a weight of 0 is NaN.
    """
    oldest = tl.maximum(unit.length - unit.queries - WINDOW + 1, 0) if WINDOW > 0 else 0
    seen = tl.maximum(tl.minimum(token, unit.length - 1), oldest)
    return tl.load(table + seen // BLOCK_SIZE), seen % BLOCK_SIZE


@triton.jit
def cache_piece(cache_row, START: tl.constexpr, SIZE: tl.constexpr, END: tl.constexpr):
    """Columns START..START + SIZE of a tile's rows, [TILE, SIZE], zero from END on."""
    column = START + tl.arange(0, SIZE)[None, :]
    if START + SIZE > END:
        return tl.load(cache_row + column, mask=column < END, other=0.0)
    return tl.load(cache_row + column)


@triton.jit
def store_result(
    output_row,
    partial_values,
    partial_log_sums,
    unit,
    row,
    used,
    row_max,
    row_sum,
    v_scale,
    acc,
    QUERIES: tl.constexpr,
    CACHE: tl.constexpr,
):
    """Store what a program found for a unit: the output if it read all its tiles, else its part.

    output_row [ROWS]: pointers to rows of the output. `row` [ROWS] is the index in a slot. The
    other names are those of the kernels.
    """
    slot = 2 * tl.program_id(0) + (unit.skipped == 0).to(tl.int32)
    slot_row = slot * (QUERIES.group * QUERIES.max_query_len) + row
    is_whole = unit.here == unit.tiles
    nonempty = row_sum > 0
    factor = tl.where(nonempty, 1 / row_sum, 0)
    if v_scale is not None:
        factor *= scale_of(v_scale, unit.head, CACHE.by_head)
    if is_whole:
        _store_pieces(output_row, used, nonempty, factor, acc, CACHE)
    else:
        log_sum = tl.where(nonempty, row_max + tl.log2(row_sum), float("-inf"))
        tl.store(partial_log_sums + slot_row, log_sum, mask=used)
        partial_row = partial_values + slot_row.to(tl.int64) * CACHE.value_size
        _store_pieces(partial_row, used, nonempty, factor, acc, CACHE)


@triton.jit
def _store_pieces(row, used, nonempty, factor, acc, CACHE: tl.constexpr):
    V: tl.constexpr = CACHE.value_pieces
    _store_piece(row, used, nonempty, factor, acc[0], 0, V[0], CACHE.value_size)
    if V[1] > 0:
        _store_piece(row, used, nonempty, factor, acc[1], V[0], V[1], CACHE.value_size)
    if V[2] > 0:
        _store_piece(row, used, nonempty, factor, acc[2], V[0] + V[1], V[2], CACHE.value_size)


@triton.jit
def _store_piece(
    out_row,
    used,
    nonempty,
    factor,
    acc,
    START: tl.constexpr,
    SIZE: tl.constexpr,
    END: tl.constexpr,
):
    """Store the normalized columns START.. of the used rows; zeros for those that saw nothing."""
    column = START + tl.arange(0, SIZE)[None, :]
    result = tl.where(nonempty[:, None], acc * factor[:, None], 0)
    pointer = out_row[:, None] + column
    mask = used[:, None] & (column < END)
    tl.store(pointer, result.to(out_row.dtype.scalar.element_ty), mask=mask)

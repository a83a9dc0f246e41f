"""Pieces of rows in device memory: loads of cache rows, stores of results. Device functions."""

# ruff: noqa: N803 -- Triton's convention: compile-time constants in capitals.
import triton
import triton.language as tl


@triton.jit
def cache_piece(cache_row, START: tl.constexpr, SIZE: tl.constexpr, END: tl.constexpr):
    """Columns START..START + SIZE of a tile's rows, [TILE, SIZE], zero from END on."""
    column = START + tl.arange(0, SIZE)[None, :]
    if START + SIZE > END:
        return tl.load(cache_row + column, mask=column < END, other=0.0)
    return tl.load(cache_row + column)


@triton.jit
def locate(
    token,
    length,
    oldest,
    table,
    BLOCK_SIZE: tl.constexpr,
):
    """Page, and row in it, of every token of a tile.

    Rows that nobody may see are read from ones that exist: what was never written could be NaN,
    and NaN times a probability of 0 is NaN.
    """
    held = tl.maximum(tl.minimum(token, length - 1), oldest)
    return tl.load(table + held // BLOCK_SIZE), held % BLOCK_SIZE


@triton.jit
def store_result(
    output_row,
    partial_values,
    partial_log_sums,
    slot_row,
    whole,
    used,
    highest,
    denominator,
    v_scale,
    acc0,
    acc1,
    acc2,
    V0: tl.constexpr,
    V1: tl.constexpr,
    V2: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
):
    """Store what a program found for a unit: the output if it saw the whole unit, else its part."""
    nonempty = denominator > 0
    factor = tl.where(nonempty, 1 / denominator, 0)
    if v_scale is not None:
        factor *= tl.load(v_scale)
    if whole:
        _store_pieces(output_row, used, nonempty, factor, acc0, acc1, acc2, V0, V1, V2, VALUE_SIZE)
    else:
        log_sum = tl.where(nonempty, highest + tl.log2(denominator), float("-inf"))
        tl.store(partial_log_sums + slot_row, log_sum, mask=used)
        row = partial_values + slot_row.to(tl.int64) * VALUE_SIZE
        _store_pieces(row, used, nonempty, factor, acc0, acc1, acc2, V0, V1, V2, VALUE_SIZE)


@triton.jit
def _store_pieces(
    row,
    used,
    nonempty,
    factor,
    acc0,
    acc1,
    acc2,
    V0: tl.constexpr,
    V1: tl.constexpr,
    V2: tl.constexpr,
    END: tl.constexpr,
):
    _store_piece(row, used, nonempty, acc0, factor, 0, V0, END)
    if V1 > 0:
        _store_piece(row, used, nonempty, acc1, factor, V0, V1, END)
    if V2 > 0:
        _store_piece(row, used, nonempty, acc2, factor, V0 + V1, V2, END)


@triton.jit
def _store_piece(
    out_row,
    used,
    nonempty,
    acc,
    factor,
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

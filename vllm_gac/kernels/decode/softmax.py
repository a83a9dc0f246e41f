"""Attention of a unit's queries, tile by tile: what both decode kernels do. Device functions.

ROWS are the unit's queries: every query token with every query head of the unit's value head.
TOKENS is the dim of `scores` along which a tile's tokens lie: 1 for [ROWS, TILE], 0 for
[TILE, ROWS].
"""

# ruff: noqa: N803, N806 -- Triton's convention: compile-time constants in capitals.
import triton
import triton.language as tl

from vllm_gac.kernels.decode.byte_pairs import even_and_odd
from vllm_gac.kernels.decode.rows import cache_piece


@triton.jit
def visible_scores(scores, token, row_end, TOKENS: tl.constexpr, WINDOW: tl.constexpr):
    """`scores` where a row sees a token of the tile, -inf elsewhere.

    token [TILE]: positions of the tile's tokens. row_end [ROWS]: a row sees the tokens before this
    position, the last WINDOW of them if there is a window.
    """
    token = tl.expand_dims(token, 1 - TOKENS)
    row_end = tl.expand_dims(row_end, TOKENS)
    visible = token < row_end
    if WINDOW > 0:
        visible &= token >= row_end - WINDOW
    return tl.where(visible, scores, float("-inf"))


@triton.jit
def online_softmax(scores, row_max, TOKENS: tl.constexpr):
    """Weights of a tile's tokens, relative to the highest score that each row has met so far.

    row_max [ROWS]: of the tiles before this one. Returns weights, of the shape of `scores`;
    rescale [ROWS], by which to multiply what was summed up relative to the old `row_max`; and the
    new `row_max` [ROWS].
    """
    new_max = tl.maximum(row_max, tl.max(scores, TOKENS))
    rescale = tl.exp2(row_max - new_max)
    weights = tl.exp2(scores - tl.expand_dims(new_max, TOKENS))
    return weights, rescale, new_max


@triton.jit
def add_latent_tile(
    scores,
    token,
    row_end,
    row_max,
    sums,
    acc,
    value_row,
    CACHE: tl.constexpr,
    WINDOW: tl.constexpr,
    dtype: tl.constexpr,
):
    """Take up a tile whose scores are [TILE, ROWS], as those of latent keys are.

    Weights are summed up tile over tile, [TILE, ROWS]: adding up the tokens of a tile waits until
    the end. value_row [TILE, 1] points to the tile's values, which are multiplied in `dtype`.
    Returns the new `row_max`, `sums` and `acc`.
    """
    scores = visible_scores(scores, token, row_end, 0, WINDOW)
    weights, rescale, row_max = online_softmax(scores, row_max, 0)
    sums = sums * rescale[None, :] + weights
    weights = tl.trans(weights.to(dtype))
    rescale = tl.reshape(rescale[None, :], [scores.shape[1], 1])
    acc = accumulate_values(acc, weights, rescale, value_row, CACHE)
    return row_max, sums, acc


@triton.jit
def no_values(ROWS: tl.constexpr, CACHE: tl.constexpr):
    """Sums of weighted values before the first tile: zeros.

    Three pieces [ROWS, value_pieces[i]]; if the row is paired, three with the even columns of each
    and three with the odd ones, half as wide. What is absent gets 16 columns, which nothing reads.
    """
    V: tl.constexpr = CACHE.value_pieces
    HALVES: tl.constexpr = 2 if CACHE.paired else 1
    acc0 = _zeros(ROWS, V[0] // HALVES)
    acc1 = _zeros(ROWS, V[1] // HALVES)
    acc2 = _zeros(ROWS, V[2] // HALVES)
    if CACHE.paired:
        return acc0, acc1, acc2, acc0, acc1, acc2
    else:
        nothing = _zeros(ROWS, 0)
        return acc0, acc1, acc2, nothing, nothing, nothing


@triton.jit
def _zeros(ROWS: tl.constexpr, SIZE: tl.constexpr):
    return tl.zeros([ROWS, SIZE if SIZE > 0 else 16], tl.float32)


@triton.jit
def accumulate_values(acc, weights, rescale, value_row, CACHE: tl.constexpr):
    """acc * rescale + weights @ values, for `acc` as no_values returns it.

    weights [ROWS, TILE] in the dtype in which values are multiplied; rescale [ROWS, 1]; value_row
    [TILE, 1] points to the tile's values.
    """
    V: tl.constexpr = CACHE.value_pieces
    acc0, acc1, acc2, odd0, odd1, odd2 = acc
    acc0, odd0 = _add_piece(acc0, odd0, weights, rescale, value_row, 0, V[0], CACHE)
    if V[1] > 0:
        acc1, odd1 = _add_piece(acc1, odd1, weights, rescale, value_row, V[0], V[1], CACHE)
    if V[2] > 0:
        acc2, odd2 = _add_piece(acc2, odd2, weights, rescale, value_row, V[0] + V[1], V[2], CACHE)
    return acc0, acc1, acc2, odd0, odd1, odd2


@triton.jit
def _add_piece(
    acc,
    odd,
    weights,
    rescale,
    value_row,
    START: tl.constexpr,
    SIZE: tl.constexpr,
    CACHE: tl.constexpr,
):
    if CACHE.paired:
        values, odd_values = even_and_odd(value_row, START, SIZE, CACHE.value_size, CACHE.assembly)
        odd = tl.dot(weights, odd_values, odd * rescale)
    else:
        values = cache_piece(value_row, START, SIZE, CACHE.value_size)
    acc = tl.dot(weights, values.to(weights.dtype), acc * rescale)
    return acc, odd


@triton.jit
def value_pieces(acc, CACHE: tl.constexpr):
    """The three pieces [ROWS, value_pieces[i]] of what accumulate_values has summed up."""
    acc0, acc1, acc2, odd0, odd1, odd2 = acc
    if CACHE.paired:
        acc0, acc1, acc2 = (
            tl.interleave(acc0, odd0),
            tl.interleave(acc1, odd1),
            tl.interleave(acc2, odd2),
        )
    return acc0, acc1, acc2

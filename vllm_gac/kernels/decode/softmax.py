"""Attention of a unit's queries, tile by tile: what both decode kernels do. Device functions.

ROWS are the unit's queries: every query token with every query head of the unit's value head.
TOKENS is the dim of `scores` along which a tile's tokens lie: 1 for [ROWS, TILE], 0 for
[TILE, ROWS].
"""

# ruff: noqa: N803 -- Triton's convention: compile-time constants in capitals.
import triton
import triton.language as tl

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
def online_softmax(scores, highest, TOKENS: tl.constexpr):
    """Weights of a tile's tokens, relative to the highest score that each row has met so far.

    highest [ROWS]: of the tiles before this one. Returns weights, of the shape of `scores`;
    shrink [ROWS], by which to multiply what was summed up relative to the old `highest`; and the
    new `highest` [ROWS].
    """
    higher = tl.maximum(highest, tl.max(scores, TOKENS))
    shrink = tl.exp2(highest - higher)
    weights = tl.exp2(scores - tl.expand_dims(higher, TOKENS))
    return weights, shrink, higher


@triton.jit
def add_latent_tile(
    scores,
    token,
    row_end,
    highest,
    sums,
    acc,
    value_row,
    V: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    dtype: tl.constexpr,
):
    """Take up a tile whose scores are [TILE, ROWS], as those of latent keys are.

    Weights are summed up tile over tile, [TILE, ROWS]: adding up the tokens of a tile waits until
    the end. value_row [TILE, 1] points to the tile's values, which are multiplied in `dtype`.
    Returns the new `highest`, `sums` and `acc`.
    """
    scores = visible_scores(scores, token, row_end, 0, WINDOW)
    weights, shrink, highest = online_softmax(scores, highest, 0)
    sums = sums * shrink[None, :] + weights
    weights = tl.trans(weights.to(dtype))
    shrink = tl.reshape(shrink[None, :], [scores.shape[1], 1])
    return highest, sums, accumulate_values(acc, weights, shrink, value_row, V, VALUE_SIZE)


@triton.jit
def no_values(ROWS: tl.constexpr, V: tl.constexpr):
    """Sums of weighted values before the first tile: zeros, in pieces [ROWS, V[i]].

    A piece of size 0 gets 16 columns, which nothing reads.
    """
    return _zeros(ROWS, V[0]), _zeros(ROWS, V[1]), _zeros(ROWS, V[2])


@triton.jit
def _zeros(ROWS: tl.constexpr, SIZE: tl.constexpr):
    return tl.zeros([ROWS, SIZE if SIZE > 0 else 16], tl.float32)


@triton.jit
def accumulate_values(acc, weights, shrink, value_row, V: tl.constexpr, VALUE_SIZE: tl.constexpr):
    """acc * shrink + weights @ values, in pieces [ROWS, V[i]].

    weights [ROWS, TILE] in the dtype in which values are multiplied; shrink [ROWS, 1]; value_row
    [TILE, 1] points to the tile's values.
    """
    acc0, acc1, acc2 = acc
    v0 = cache_piece(value_row, 0, V[0], VALUE_SIZE)
    acc0 = tl.dot(weights, v0.to(weights.dtype), acc0 * shrink)
    if V[1] > 0:
        v1 = cache_piece(value_row, V[0], V[1], VALUE_SIZE)
        acc1 = tl.dot(weights, v1.to(weights.dtype), acc1 * shrink)
    if V[2] > 0:
        v2 = cache_piece(value_row, V[0] + V[1], V[2], VALUE_SIZE)
        acc2 = tl.dot(weights, v2.to(weights.dtype), acc2 * shrink)
    return acc0, acc1, acc2

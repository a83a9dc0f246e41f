"""Softmax relative to a reference that only some tiles renew. Device functions.

Softmax is the same relative to any reference, as long as the weights, and their sums, are within
what their dtype holds. The usual reference is the highest score so far. To find it, all warps of a
program wait for each other three times in every tile, and everything that was summed up is scaled.

Here only every RENEW_EVERY-th tile, from the first one on, renews the reference. If a later score
exceeds it by so much that weights might overflow, what was summed up is of no use. The kernel then
reads the unit's tiles once more, and every tile renews the reference.

Scores are logarithms to base 2. They are [TILE, ROWS], as in latent_split_kv.py.

    reference   [ROWS]: what each row's scores are relative to
    sums        [TILE, ROWS]: weights summed over the tiles, to be added up at the end
    acc         sums of weighted values, as softmax.no_values describes them
    tops        [TILE, ROWS]: by how much scores exceeded the reference of their time, at most
"""

# ruff: noqa: N803, N806 -- Triton's convention: compile-time constants in capitals.
import triton
import triton.language as tl

from vllm_gac.kernels.decode.softmax import accumulate_values


@triton.jit
def renew_reference(scores, reference, sums, acc, dtype: tl.constexpr):
    """Let the reference be the highest score of each row so far.

    fp16 holds numbers from 2^-24 to 2^16. In fp16, the weight of the highest score is 2^-6, so that
    later ones have room above it. `dtype` is that of weights. Returns the new reference, sums and
    acc.
    """
    LEEWAY: tl.constexpr = 6.0 if dtype == tl.float16 else 0.0
    higher = tl.maximum(reference, tl.max(scores, 0) + LEEWAY)
    shrink = tl.exp2(reference - higher)
    sums *= shrink[None, :]
    shrink = tl.reshape(shrink[None, :], [scores.shape[1], 1])
    acc0, acc1, acc2, odd0, odd1, odd2 = acc
    acc = (
        acc0 * shrink,
        acc1 * shrink,
        acc2 * shrink,
        odd0 * shrink,
        odd1 * shrink,
        odd2 * shrink,
    )
    return higher, sums, acc


@triton.jit
def add_tile(
    scores,
    reference,
    sums,
    tops,
    acc,
    value_row,
    V: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    dtype: tl.constexpr,
    PAIRED: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):
    """Take up a tile. value_row [TILE, 1] points to its values, which are multiplied in `dtype`.

    Returns the new sums, tops and acc.
    """
    scores -= reference[None, :]
    tops = tl.maximum(tops, scores)
    weights = tl.exp2(scores)
    sums += weights
    no_change = tl.full([scores.shape[1], 1], 1.0, tl.float32)
    acc = accumulate_values(
        acc, tl.trans(weights.to(dtype)), no_change, value_row,
        V, VALUE_SIZE, PAIRED, ASSEMBLY,
    )  # fmt: skip
    return sums, tops, acc


@triton.jit
def was_exceeded(tops, dtype: tl.constexpr):
    """Whether some weight may have been too large for `dtype`, or the sum of all for fp32."""
    MOST: tl.constexpr = 15.0 if dtype == tl.float16 else 64.0
    return tl.max(tl.max(tops, 0), 0) > MOST

"""What both kernels share: whose tile a program has, and asking for its weights ahead of time."""

# ruff: noqa: N803 -- Triton's convention: compile-time constants in capitals.
import triton
import triton.language as tl

# Elements in a cache line of 128 bytes.
_LINE = tl.constexpr(64)


@triton.jit
def program_tile(
    tile,
    weight_0,
    weight_1,
    weight_2,
    k0_div8,
    k1_div8,
    k2_div8,
    features_0,
    features_1,
    features_2,
    LINEARS: tl.constexpr,
    GATED: tl.constexpr,
    FEATURES: tl.constexpr,
):
    """The features of a tile and their weights, where tiles have FEATURES features.

    Gate and up are one linear here, of the gate's width, whose tiles have rows of both.

    Returns the features [FEATURES] and which of them there are, the linear's width, pointers to
    the rows of its weight [FEATURES, 1] and, if GATED, to those of up, and where the linear's
    columns of x and of the output are.
    """
    own, features, width, weight = tile, features_0, k0_div8 * 8, weight_0
    x_column, out_column = 0, 0
    tiles_0 = tl.cdiv(features_0, FEATURES)
    tiles_01 = tiles_0 + tl.cdiv(features_1, FEATURES)
    if not GATED and LINEARS > 2 and tile >= tiles_01:
        own = tile - tiles_01
        features = features_2
        width = k2_div8 * 8
        weight = weight_2
        x_column = (k0_div8 + k1_div8) * 8
        out_column = features_0 + features_1
    elif not GATED and LINEARS > 1 and tile >= tiles_0:
        own = tile - tiles_0
        features = features_1
        width = k1_div8 * 8
        weight = weight_1
        x_column = k0_div8 * 8
        out_column = features_0
    feature = own * FEATURES + tl.arange(0, FEATURES)
    # Lanes past the last feature compute that one again, and do not store it.
    row_of = tl.minimum(feature, features - 1).to(tl.int64)[:, None]
    first = weight + row_of * width
    second = weight_1 + row_of * (k1_div8 * 8)
    return feature, feature < features, width, first, second, x_column, out_column


@triton.jit
def fetch(rows, begin, width, AHEAD: tl.constexpr):
    """Ask for AHEAD elements of each row of weights, into the L2 cache, without waiting.

    `rows` are pointers, [features, 1], and `begin` is the first element.
    """
    column = begin + tl.arange(0, AHEAD // _LINE)[None, :] * _LINE
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
        "=r,l",
        [rows + tl.minimum(column, width - 8)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )

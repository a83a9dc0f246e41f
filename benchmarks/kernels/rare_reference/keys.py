"""Latents of a tile, and keys rebuilt from them, with few products. Device functions.

As in vllm_gac/kernels/decode/latent_keys.py, but even and odd columns of an fp8 piece are one
matrix, which meets an up-projection whose columns are in that order.
"""

# ruff: noqa: N803 -- Triton's convention: compile-time constants in capitals.
import triton
import triton.language as tl

from vllm_gac.kernels.decode.byte_pairs import even_and_odd
from vllm_gac.kernels.decode.rows import cache_piece


@triton.jit
def load_latents(
    latent_row,
    KEY_SIZE: tl.constexpr,
    K: tl.constexpr,
    dtype: tl.constexpr,
    PAIRED: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):
    """A tile's latents in `dtype`, in pieces [TILE, K[i]]; latent_row [TILE, 1] points to them.

    If PAIRED, a piece has its even columns first, then the odd ones. Pieces of size 0 are there in
    name only: they repeat the first.
    """
    latent0 = _latent_piece(latent_row, 0, K[0], KEY_SIZE, dtype, PAIRED, ASSEMBLY)
    latent1 = latent0
    latent2 = latent0
    if K[1] > 0:
        latent1 = _latent_piece(latent_row, K[0], K[1], KEY_SIZE, dtype, PAIRED, ASSEMBLY)
    if K[2] > 0:
        latent2 = _latent_piece(latent_row, K[0] + K[1], K[2], KEY_SIZE, dtype, PAIRED, ASSEMBLY)
    return latent0, latent1, latent2


@triton.jit
def _latent_piece(
    latent_row,
    START: tl.constexpr,
    SIZE: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    dtype: tl.constexpr,
    PAIRED: tl.constexpr,
    ASSEMBLY: tl.constexpr,
):
    if PAIRED:
        even, odd = even_and_odd(latent_row, START, SIZE, KEY_SIZE, ASSEMBLY)
        return side_by_side(even, odd)
    else:
        return _in_registers(cache_piece(latent_row, START, SIZE, KEY_SIZE).to(dtype), ASSEMBLY)


@triton.jit
def rebuild_keys(
    latent,
    up_head,
    PAIRS: tl.constexpr,
    PADDED: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    K: tl.constexpr,
    PAIRED: tl.constexpr,
):
    """A tile's keys of one original head, not yet rotated: fp32 [TILE, PADDED], low and high.

    latent: pieces as load_latents returns them; up_head points to the head's up-projection.
    """
    dtype: tl.constexpr = latent[0].dtype
    piece = _up_piece(up_head, PAIRS, PADDED, 0, K[0], KEY_SIZE, PAIRED)
    key = tl.dot(latent[0], piece.to(dtype))
    if K[1] > 0:
        piece = _up_piece(up_head, PAIRS, PADDED, K[0], K[1], KEY_SIZE, PAIRED)
        key = tl.dot(latent[1], piece.to(dtype), key)
    if K[2] > 0:
        piece = _up_piece(up_head, PAIRS, PADDED, K[0] + K[1], K[2], KEY_SIZE, PAIRED)
        key = tl.dot(latent[2], piece.to(dtype), key)
    return tl.split(tl.trans(tl.reshape(key, [key.shape[0], 2, PADDED]), 0, 2, 1))


@triton.jit
def side_by_side(low, high):
    """low and high [n, PADDED] as one matrix [n, 2 * PADDED]; on Hopper no number moves."""
    both = tl.trans(tl.join(low, high), 0, 2, 1)
    return tl.reshape(both, [low.shape[0], 2 * low.shape[1]])


@triton.jit
def _in_registers(x, ASSEMBLY: tl.constexpr):
    """x unchanged, but in registers.

    Hopper's matrix unit could read x from shared memory, but would then need one more pipeline
    stage there. Without that stage two programs fit on a multiprocessor.
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
    PAIRED: tl.constexpr,
):
    """Columns START..START + SIZE of one head's up-projection, transposed: [SIZE, 2 * PADDED].

    The low halves of all pairs come first, then the high halves, each padded to PADDED by zeros. If
    PAIRED, even columns come first, then odd ones.
    """
    output = tl.arange(0, 2 * PADDED)
    half, pair = output // PADDED, output % PADDED
    column = tl.arange(0, SIZE)
    if PAIRED:
        column = 2 * (column % (SIZE // 2)) + column // (SIZE // 2)
    column += START
    mask = (pair < PAIRS)[:, None] & (column < KEY_SIZE)[None, :]
    offset = (half * PAIRS + pair)[:, None] * KEY_SIZE + column[None, :]
    return tl.trans(tl.load(up_head + offset, mask=mask, other=0.0))

"""Keys of a tile, rebuilt from latents and rotated. Device functions.

A head's rotary pairs are split into their low halves (the first elements) and high halves, each
padded to a power of two.
"""

# ruff: noqa: N803, N806 -- Triton's convention: compile-time constants in capitals.
from typing import NamedTuple

import triton
import triton.language as tl

from vllm_gac.kernels.decode.byte_pairs import even_and_odd
from vllm_gac.kernels.decode.rows import cache_piece


class Rebuilt(NamedTuple):
    """What latents are rebuilt to. All fields are compile-time constants.

    heads: original KV heads that one latent gives keys to. pairs: rotary pairs of a head, half its
    size. padded: `pairs` rounded up to a power of two, PADDED in shapes.
    """

    heads: int
    pairs: int
    padded: int


@triton.jit
def load_latents(latent_row, CACHE: tl.constexpr, dtype: tl.constexpr):
    """A tile's latents in `dtype`, in pieces [TILE, key_pieces[i]].

    latent_row [TILE, 1] points to them. Pieces of size 0 are there in name only: they repeat the
    first.
    """
    K: tl.constexpr = CACHE.key_pieces
    latent0 = _latent_piece(latent_row, 0, K[0], CACHE, dtype)
    latent1 = latent0
    latent2 = latent0
    if K[1] > 0:
        latent1 = _latent_piece(latent_row, K[0], K[1], CACHE, dtype)
    if K[2] > 0:
        latent2 = _latent_piece(latent_row, K[0] + K[1], K[2], CACHE, dtype)
    return latent0, latent1, latent2


@triton.jit
def _latent_piece(
    latent_row, START: tl.constexpr, SIZE: tl.constexpr, CACHE: tl.constexpr, dtype: tl.constexpr
):
    piece = cache_piece(latent_row, START, SIZE, CACHE.key_size)
    return _in_registers(piece.to(dtype), CACHE.assembly)


@triton.jit
def load_latent_pairs(latent_row, CACHE: tl.constexpr):
    """As load_latents, of an fp8 cache: the even and the odd columns of each piece, in fp16."""
    K: tl.constexpr = CACHE.key_pieces
    even0, odd0 = even_and_odd(latent_row, 0, K[0], CACHE.key_size, CACHE.assembly)
    even1, odd1 = even0, odd0
    even2, odd2 = even0, odd0
    if K[1] > 0:
        even1, odd1 = even_and_odd(latent_row, K[0], K[1], CACHE.key_size, CACHE.assembly)
    if K[2] > 0:
        even2, odd2 = even_and_odd(latent_row, K[0] + K[1], K[2], CACHE.key_size, CACHE.assembly)
    return even0, odd0, even1, odd1, even2, odd2


@triton.jit
def rebuild_from_pairs(latent, up_head, key_scale, CACHE: tl.constexpr, REBUILT: tl.constexpr):
    """As rebuild_keys, of pieces as load_latent_pairs returns them."""
    K: tl.constexpr = CACHE.key_pieces
    even, odd = _up_pair(up_head, key_scale, 0, K[0], CACHE, REBUILT)
    key = tl.dot(latent[0], even)
    key = tl.dot(latent[1], odd, key)
    if K[1] > 0:
        even, odd = _up_pair(up_head, key_scale, K[0], K[1], CACHE, REBUILT)
        key = tl.dot(latent[2], even, key)
        key = tl.dot(latent[3], odd, key)
    if K[2] > 0:
        even, odd = _up_pair(up_head, key_scale, K[0] + K[1], K[2], CACHE, REBUILT)
        key = tl.dot(latent[4], even, key)
        key = tl.dot(latent[5], odd, key)
    return tl.split(tl.trans(tl.reshape(key, [key.shape[0], 2, REBUILT.padded]), 0, 2, 1))


@triton.jit
def _up_pair(
    up_head,
    key_scale,
    START: tl.constexpr,
    SIZE: tl.constexpr,
    CACHE: tl.constexpr,
    REBUILT: tl.constexpr,
):
    piece = tl.trans(_up_piece(up_head, key_scale, START, SIZE, CACHE, REBUILT))
    even, odd = tl.split(tl.reshape(piece.to(tl.float16), [2 * REBUILT.padded, SIZE // 2, 2]))
    return tl.trans(even), tl.trans(odd)


@triton.jit
def rebuild_keys(latent, up_head, key_scale, CACHE: tl.constexpr, REBUILT: tl.constexpr):
    """A tile's keys of one original head, not yet rotated: fp32 [TILE, PADDED], low and high.

    latent: pieces as load_latents returns them; up_head points to the head's up-projection;
    key_scale: the latents' in an fp8 cache, or None. Without it keys may be too large for fp16.
    """
    K: tl.constexpr = CACHE.key_pieces
    dtype: tl.constexpr = latent[0].dtype
    key = tl.dot(latent[0], _up_piece(up_head, key_scale, 0, K[0], CACHE, REBUILT).to(dtype))
    if K[1] > 0:
        piece = _up_piece(up_head, key_scale, K[0], K[1], CACHE, REBUILT).to(dtype)
        key = tl.dot(latent[1], piece, key)
    if K[2] > 0:
        piece = _up_piece(up_head, key_scale, K[0] + K[1], K[2], CACHE, REBUILT).to(dtype)
        key = tl.dot(latent[2], piece, key)
    return tl.split(tl.trans(tl.reshape(key, [key.shape[0], 2, REBUILT.padded]), 0, 2, 1))


@triton.jit
def cos_sin(angle, ASSEMBLY: tl.constexpr):
    """Cosine and sine in fp16. The hardware's approximations are exact enough within one tile."""
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
def rotate(low, high, cos, sin, ASSEMBLY: tl.constexpr):
    """Rotate pairs (low, high) of fp32 forward; the result is fp16. Two elements an instruction."""
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
def rotate_back(low, high, cos, sin):
    """Rotate pairs (low, high) backward, in the dtype they have."""
    return low * cos + high * sin, high * cos - low * sin


@triton.jit
def derotated_queries(query_row, known, pair, frequency, start, scale, PAIRS: tl.constexpr):
    """Rotary pairs of a unit's queries times `scale`, rotated backward by `start` tokens.

    query_row [ROWS]: pointers. known [ROWS, pairs]: which elements to load; the others are 0.
    pair, frequency [pairs]: index of each pair in a head, and its radians per token. Returns low
    and high halves, [ROWS, pairs].
    """
    low = tl.load(query_row[:, None] + pair[None, :], mask=known, other=0.0)
    high = tl.load(query_row[:, None] + PAIRS + pair[None, :], mask=known, other=0.0)
    angle = frequency * start.to(tl.float32)
    return rotate_back(
        low.to(tl.float32) * scale,
        high.to(tl.float32) * scale,
        tl.cos(angle)[None, :],
        tl.sin(angle)[None, :],
    )


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
    key_scale,
    START: tl.constexpr,
    SIZE: tl.constexpr,
    CACHE: tl.constexpr,
    REBUILT: tl.constexpr,
):
    """Columns START..START + SIZE of one head's up-projection, transposed: [SIZE, 2 * PADDED].

    The low halves of all pairs come first, then the high halves, each padded to PADDED by zeros.
    """
    output = tl.arange(0, 2 * REBUILT.padded)
    half, pair = output // REBUILT.padded, output % REBUILT.padded
    column = START + tl.arange(0, SIZE)
    mask = (pair < REBUILT.pairs)[:, None] & (column < CACHE.key_size)[None, :]
    offset = (half * REBUILT.pairs + pair)[:, None] * CACHE.key_size + column[None, :]
    piece = tl.load(up_head + offset, mask=mask, other=0.0)
    if key_scale is not None:
        piece = piece.to(tl.float32) * key_scale
    return tl.trans(piece)

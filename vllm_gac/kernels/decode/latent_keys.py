"""Keys of a tile, rebuilt from latents and rotated. Device functions.

A head's rotary pairs are split into their low halves (the first elements) and high halves, each
padded from PAIRS to PADDED, a power of two.
"""

# ruff: noqa: N803 -- Triton's convention: compile-time constants in capitals.
import triton
import triton.language as tl

from vllm_gac.kernels.decode.byte_pairs import even_and_odd
from vllm_gac.kernels.decode.rows import cache_piece


@triton.jit
def load_latents(
    latent_row, KEY_SIZE: tl.constexpr, K: tl.constexpr, dtype: tl.constexpr, ASSEMBLY: tl.constexpr
):
    """A tile's latents in `dtype`, in pieces [TILE, K[i]]; latent_row [TILE, 1] points to them.

    Pieces of size 0 are there in name only: they repeat the first.
    """
    latent0 = _in_registers(cache_piece(latent_row, 0, K[0], KEY_SIZE).to(dtype), ASSEMBLY)
    latent1 = latent0
    latent2 = latent0
    if K[1] > 0:
        latent1 = _in_registers(cache_piece(latent_row, K[0], K[1], KEY_SIZE).to(dtype), ASSEMBLY)
    if K[2] > 0:
        latent2 = cache_piece(latent_row, K[0] + K[1], K[2], KEY_SIZE).to(dtype)
        latent2 = _in_registers(latent2, ASSEMBLY)
    return latent0, latent1, latent2


@triton.jit
def load_latent_pairs(latent_row, KEY_SIZE: tl.constexpr, K: tl.constexpr, ASSEMBLY: tl.constexpr):
    """As load_latents, of an fp8 cache: the even and the odd columns of each piece, in fp16."""
    even0, odd0 = even_and_odd(latent_row, 0, K[0], KEY_SIZE, ASSEMBLY)
    even1, odd1 = even0, odd0
    even2, odd2 = even0, odd0
    if K[1] > 0:
        even1, odd1 = even_and_odd(latent_row, K[0], K[1], KEY_SIZE, ASSEMBLY)
    if K[2] > 0:
        even2, odd2 = even_and_odd(latent_row, K[0] + K[1], K[2], KEY_SIZE, ASSEMBLY)
    return even0, odd0, even1, odd1, even2, odd2


@triton.jit
def rebuild_from_pairs(
    latent,
    up_head,
    PAIRS: tl.constexpr,
    PADDED: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    K: tl.constexpr,
):
    """As rebuild_keys, of pieces as load_latent_pairs returns them."""
    even, odd = _up_pair(up_head, PAIRS, PADDED, 0, K[0], KEY_SIZE)
    key = tl.dot(latent[0], even)
    key = tl.dot(latent[1], odd, key)
    if K[1] > 0:
        even, odd = _up_pair(up_head, PAIRS, PADDED, K[0], K[1], KEY_SIZE)
        key = tl.dot(latent[2], even, key)
        key = tl.dot(latent[3], odd, key)
    if K[2] > 0:
        even, odd = _up_pair(up_head, PAIRS, PADDED, K[0] + K[1], K[2], KEY_SIZE)
        key = tl.dot(latent[4], even, key)
        key = tl.dot(latent[5], odd, key)
    return tl.split(tl.trans(tl.reshape(key, [key.shape[0], 2, PADDED]), 0, 2, 1))


@triton.jit
def _up_pair(
    up_head,
    PAIRS: tl.constexpr,
    PADDED: tl.constexpr,
    START: tl.constexpr,
    SIZE: tl.constexpr,
    KEY_SIZE: tl.constexpr,
):
    piece = tl.trans(_up_piece(up_head, PAIRS, PADDED, START, SIZE, KEY_SIZE))
    even, odd = tl.split(tl.reshape(piece.to(tl.float16), [2 * PADDED, SIZE // 2, 2]))
    return tl.trans(even), tl.trans(odd)


@triton.jit
def rebuild_keys(
    latent,
    up_head,
    PAIRS: tl.constexpr,
    PADDED: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    K: tl.constexpr,
):
    """A tile's keys of one original head, not yet rotated: fp32 [TILE, PADDED], low and high.

    latent: pieces as load_latents returns them; up_head points to the head's up-projection.
    """
    dtype: tl.constexpr = latent[0].dtype
    key = tl.dot(latent[0], _up_piece(up_head, PAIRS, PADDED, 0, K[0], KEY_SIZE).to(dtype))
    if K[1] > 0:
        piece = _up_piece(up_head, PAIRS, PADDED, K[0], K[1], KEY_SIZE).to(dtype)
        key = tl.dot(latent[1], piece, key)
    if K[2] > 0:
        piece = _up_piece(up_head, PAIRS, PADDED, K[0] + K[1], K[2], KEY_SIZE).to(dtype)
        key = tl.dot(latent[2], piece, key)
    return tl.split(tl.trans(tl.reshape(key, [key.shape[0], 2, PADDED]), 0, 2, 1))


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
    PAIRS: tl.constexpr,
    PADDED: tl.constexpr,
    START: tl.constexpr,
    SIZE: tl.constexpr,
    KEY_SIZE: tl.constexpr,
):
    """Columns START..START + SIZE of one head's up-projection, transposed: [SIZE, 2 * PADDED].

    The low halves of all pairs come first, then the high halves, each padded to PADDED by zeros.
    """
    output = tl.arange(0, 2 * PADDED)
    half, pair = output // PADDED, output % PADDED
    column = START + tl.arange(0, SIZE)
    mask = (pair < PAIRS)[:, None] & (column < KEY_SIZE)[None, :]
    offset = (half * PAIRS + pair)[:, None] * KEY_SIZE + column[None, :]
    return tl.trans(tl.load(up_head + offset, mask=mask, other=0.0))

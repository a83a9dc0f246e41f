"""Tiles of an fp8 cache, read as pairs of neighbouring columns. Device functions.

The instruction that brings a tile from shared memory to the registers for the tensor cores, and
transposes it if needed, moves 16-bit elements only. Each 8-bit one would need a load of its own.
So two columns travel as one number. Even and odd columns are then two matrices: a product that sums
over columns is the sum of two, and columns of results are interleaved at the end.
"""

# ruff: noqa: N803 -- Triton's convention: compile-time constants in capitals.
import triton
import triton.language as tl

from vllm_gac.kernels.decode.rows import cache_piece


@triton.jit
def even_and_odd(
    cache_row, START: tl.constexpr, SIZE: tl.constexpr, END: tl.constexpr, ASSEMBLY: tl.constexpr
):
    """Columns START..START + SIZE of a tile's rows in e4m3, as two matrices [TILE, SIZE / 2].

    START and END are even, and rows begin on whole pairs. The result is fp16.
    """
    pair_row = cache_row.to(tl.pointer_type(tl.uint16))
    pairs = cache_piece(pair_row, START // 2, SIZE // 2, END // 2)
    if ASSEMBLY:
        # One instruction converts two elements. A register holds two pairs, one behind the other.
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 sorted;
            .reg .b16 even, odd;
            prmt.b32 sorted, $2, 0, 0x3120;
            mov.b32 {even, odd}, sorted;
            cvt.rn.f16x2.e4m3x2 $0, even;
            cvt.rn.f16x2.e4m3x2 $1, odd;
            }""",
            "=r,=r,r",
            [pairs],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        return _as_fp16(pairs & 0xFF), _as_fp16(pairs >> 8)


@triton.jit
def _as_fp16(bits):
    return bits.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)

"""Makes heads wider with zeros, or narrower, for kernels that need equal key and value sizes."""

# ruff: noqa: N803 -- Triton's convention: compile-time constants in capitals.
import torch
import triton
import triton.language as tl

_ROWS = 32  # heads per program


def copy_columns(source: torch.Tensor, target: torch.Tensor, first: int = 0) -> None:
    """Set target[:, :, c] = source[:, :, first + c], and zeros past the end of the source's heads.

    Args:
        source: [tokens, heads, size], its last dim contiguous.
        target: the same, with another size.
        first: the first column of the source to copy.
    """
    tokens, heads, size = target.shape
    if not tokens:
        return
    _copy[(triton.cdiv(tokens * heads, _ROWS),)](
        source,
        target,
        tokens * heads,
        source.stride(0),
        source.stride(1),
        target.stride(0),
        target.stride(1),
        HEADS=heads,
        FIRST=first,
        HELD=source.shape[2],
        SIZE=size,
        LANES=triton.next_power_of_2(size),
        ROWS=_ROWS,
    )


@triton.jit(do_not_specialize=["count"])
def _copy(
    source,
    target,
    count,
    source_token_stride,
    source_head_stride,
    target_token_stride,
    target_head_stride,
    HEADS: tl.constexpr,
    FIRST: tl.constexpr,
    HELD: tl.constexpr,
    SIZE: tl.constexpr,
    LANES: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One program copies ROWS heads."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token, head = (row // HEADS).to(tl.int64), row % HEADS
    column = tl.arange(0, LANES)[None, :]
    there = (row < count)[:, None]
    from_row = source + token * source_token_stride + head * source_head_stride
    to_row = target + token * target_token_stride + head * target_head_stride
    held = there & (FIRST + column < HELD)
    x = tl.load(from_row[:, None] + FIRST + column, mask=held & (column < SIZE), other=0.0)
    tl.store(to_row[:, None] + column, x, mask=there & (column < SIZE))

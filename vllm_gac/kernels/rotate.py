"""Rotates heads, as `vllm_gac.layout.rope.rotate` does, in one pass over them."""

# ruff: noqa: N803 -- Triton's convention: compile-time constants in capitals.
import torch
import triton
import triton.language as tl

from vllm_gac.kernels.contiguous import require_contiguous


def rotate_heads(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the pairs (i, i + size / 2) of each head by the angles of its token.

    Raises ValueError if a tensor is not contiguous.

    Args:
        heads: [batch, tokens, heads, size].
        cos: [tokens, heads, size / 2], or [tokens, 1, size / 2] for all heads.
        sin: The same of sines.

    Returns:
        A tensor like `heads`, computed in fp32 and rounded once.
    """
    require_contiguous("rotate_heads", heads, cos, sin)
    out = torch.empty_like(heads)
    batch, tokens, count, size = heads.shape
    if heads.numel():
        _rotate_heads[(batch * tokens,)](
            heads,
            cos,
            sin,
            out,
            tokens,
            count,
            size // 2,
            BY_HEAD=cos.shape[1] > 1,
            HEADS=triton.next_power_of_2(count),
            PAIRS=triton.next_power_of_2(size // 2),
        )
    return out


@triton.jit
def _rotate_heads(
    heads,
    cos,
    sin,
    out,
    tokens,
    count,
    pairs,
    BY_HEAD: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """One program: the heads of a token."""
    row = tl.program_id(0).to(tl.int64)
    head, pair = tl.arange(0, HEADS)[:, None], tl.arange(0, PAIRS)[None]
    inside = (head < count) & (pair < pairs)
    at = (row * count + head) * 2 * pairs + pair
    first = tl.load(heads + at, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(heads + at + pairs, mask=inside, other=0.0).to(tl.float32)
    angle = (row % tokens) * pairs + pair
    if BY_HEAD:
        angle = ((row % tokens) * count + head) * pairs + pair
    x = tl.load(cos + angle, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(sin + angle, mask=inside, other=0.0).to(tl.float32)
    dtype = out.dtype.element_ty
    tl.store(out + at, (first * x - second * y).to(dtype), mask=inside)
    tl.store(out + at + pairs, (second * x + first * y).to(dtype), mask=inside)

"""The scales of an fp8 cache: one of all keys and one of all values, or one for each head."""

# ruff: noqa: N803 -- Triton's convention: compile-time constants in capitals.
import torch
import triton
import triton.language as tl


def is_by_head(k_scale: torch.Tensor | None) -> bool:
    """Whether keys and values of several heads have a scale for each: what BY_HEAD is in kernels.

    There are at least as many key heads as value heads, so keys tell.
    """
    return k_scale is not None and k_scale.numel() > 1


@triton.jit
def scale_of(scale, head, BY_HEAD: tl.constexpr):
    """The scale of `head`, or of each of several heads."""
    return tl.load(scale + head) if BY_HEAD else tl.load(scale)

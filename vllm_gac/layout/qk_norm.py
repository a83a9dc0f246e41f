"""RMSNorm of query heads and key heads before RoPE, and what of a head is kept."""

import math

import torch
from torch.nn.functional import pad, rms_norm


def norm_heads(heads: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Norm whole heads, and keep the pairs that have weights.

    The mean square is over all of a head. So q_proj and k_proj give whole heads, whose pairs are
    in an order in which the kept ones come first (compression/methods/heads/normed_keys.py).

    Args:
        heads: [..., heads, head_dim].
        weight: [head_dim], or [key heads, key size] for kept pairs of each key head. Query heads
            that share a key head are neighbours.
        eps: is added to the mean square.

    Returns:
        [..., heads, head_dim] or [..., heads, key size], in the dtype of `heads`.
    """
    normed = rms_norm(heads, heads.shape[-1:], eps=eps)
    if weight.ndim == 1:
        return normed * weight
    (key_heads, size), pairs = weight.shape, heads.shape[-1] // 2
    halves = normed.reshape(*heads.shape[:-2], key_heads, -1, 2, pairs)
    # Zeros where keys were padded to more than whole heads.
    kept = pad(halves, (0, size // 2 - pairs)) * weight.view(key_heads, 1, 2, size // 2)
    return kept.reshape(*heads.shape[:-1], size)


def norm_latents(latents: torch.Tensor, head_dim: int, eps: float) -> torch.Tensor:
    """Norm latents as the heads that they give are normed.

    A head is an orthonormal matrix times its latent, so both have the same sum of squares, of which
    the mean is over the elements of the head.

    Args:
        latents: [..., heads, size]; each head has its own.
        head_dim: The size of a head.
        eps: is added to the mean square.

    Returns:
        [..., heads, size], in the dtype of `latents`.
    """
    size = latents.shape[-1]
    normed = rms_norm(latents, (size,), eps=eps * head_dim / size)
    return normed * math.sqrt(head_dim / size)

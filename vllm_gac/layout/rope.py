"""Rotary position embedding: the frequencies of a config, and the rotation itself.

Pair f of a head consists of its rows f and f + size / 2, as in Hugging Face's layout.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from vllm_gac.layout.schema import RopeParameters


def inverse_frequencies(rope: RopeParameters, head_dim: int) -> torch.Tensor:
    """The frequency of each pair, as transformers computes it.

    Args:
        rope: parameters of type default, linear or llama3; all three have attention scaling 1.
        head_dim: size of a head.

    Returns:
        Radians per position, fp32 [head_dim / 2].
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    inv_freq = 1.0 / (rope.rope_theta**exponents)
    if rope.rope_type == "linear":
        return inv_freq / rope.factor
    if rope.rope_type == "llama3":
        return _llama3(inv_freq, rope)
    return inv_freq


def _llama3(inv_freq: torch.Tensor, rope: RopeParameters) -> torch.Tensor:
    """Llama 3.1: low frequencies divided by `factor`, high ones kept, a ramp between."""
    context = rope.original_max_position_embeddings
    wavelength = 2 * math.pi / inv_freq
    ramp = (context / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    kept = ramp.clamp(0, 1)
    return (1 - kept) * inv_freq / rope.factor + kept * inv_freq


def cos_sin(positions: torch.Tensor, inv_freq: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of every angle.

    Args:
        positions: [tokens].
        inv_freq: radians per position, [heads, pairs].

    Returns:
        Two fp32 tensors [tokens, heads, pairs].
    """
    angles = positions.to(torch.float32)[:, None, None] * inv_freq
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate each pair of x [..., size] by its angle; cos and sin broadcast to [..., size / 2].

    The rotation is computed in the dtype of cos and sin; the result has the dtype of x.
    """
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(x.dtype)

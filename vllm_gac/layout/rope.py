"""Rotary position embedding: the frequencies of a config, and the rotation itself.

Pair f of a head consists of its rows f and f + size / 2, as in Hugging Face's layout. YaRN also
multiplies rotated queries and keys by a number. It is squared in what scores are multiplied by
(`ModelLayout.score_scale`), so nothing here, in kernels or in caches knows of it.
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
        rope: parameters of type default, linear, llama3 or yarn.
        head_dim: size of a head.

    Returns:
        Radians per position, fp32 [head_dim / 2]. Always on the CPU, as stored tables are: vLLM
        makes models with the GPU as torch's default device.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    inv_freq = 1.0 / (rope.rope_theta**exponents)
    if rope.rope_type == "linear":
        return inv_freq / rope.factor
    if rope.rope_type == "llama3":
        return _llama3(inv_freq, rope)
    if rope.rope_type == "yarn":
        return _yarn(inv_freq, rope, head_dim)
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


def _yarn(inv_freq: torch.Tensor, rope: RopeParameters, head_dim: int) -> torch.Tensor:
    """YaRN: as Llama 3.1, with a ramp over the number of the pair.

    Of the pairs that turn `beta_fast` times within the original context and more often, frequencies
    are kept; of those that turn `beta_slow` times and less, they are divided by `factor`.
    """

    def pair_of(turns: float) -> float:
        wavelength = rope.original_max_position_embeddings / turns
        return head_dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(rope.rope_theta))

    first, last = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    # To head_dim - 1, although pairs end at half of it: vLLM and transformers do so.
    first, last = max(first, 0), min(last, head_dim - 1)
    if first == last:
        last += 0.001
    pairs = torch.arange(head_dim // 2, dtype=torch.float32, device="cpu")
    divided = ((pairs - first) / (last - first)).clamp(0, 1)
    return divided * inv_freq / rope.factor + (1 - divided) * inv_freq


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


def of_queries(
    positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rope: RopeParameters
) -> tuple[torch.Tensor, torch.Tensor]:
    """What queries are turned by, and scaled by if the model scales them by their position.

    Args:
        positions: [tokens].
        cos: [tokens, heads, pairs], as `cos_sin` gives it, and so is `sin`.
        sin: See `cos`.
        rope: Its `llama_4_scaling_beta` is 0 if queries are not scaled.

    Returns:
        Two tensors of the same shape, both multiplied by 1 + beta ln(1 + n) for a query with n
        whole contexts of the original length before it.
    """
    if not rope.llama_4_scaling_beta:
        return cos, sin
    contexts = (positions // rope.original_max_position_embeddings).to(cos.dtype)
    scale = (1 + rope.llama_4_scaling_beta * torch.log1p(contexts))[:, None, None]
    return cos * scale, sin * scale


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate each pair of x [..., size] by its angle; cos and sin broadcast to [..., size / 2].

    The rotation is computed in the dtype of cos and sin; the result has the dtype of x.
    """
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(x.dtype)

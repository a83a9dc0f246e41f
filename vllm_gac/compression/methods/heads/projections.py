"""Projections as methods see them: biases are columns, and pairs of rows are complex rows.

W x + b is [W b] times x with a 1 appended. Statistics of the input of biased q, k and v projections
have that 1, too (compression/statistics_file.py). So whatever a method does to rows of W it does to
the bias, and its errors count the bias.

RoPE sees the rows f and f + P of a head as one complex row: it multiplies pair f at position t by
exp(i t inv_freq[f]). The logit of a query and a key is Re(sum_f conj(q_f) k_f).
"""

import math
from collections.abc import Mapping

import torch

# Offsets of keys that are counted, in tokens: most attention is near.
_OFFSETS = 32


def to_pairs(weight: torch.Tensor, heads: int, pairs: int) -> torch.Tensor:
    """Real [heads * 2 pairs, hidden] -> complex128 [heads, pairs, hidden]."""
    halves = weight.double().view(heads, 2, pairs, weight.shape[-1])
    return torch.complex(halves[:, 0], halves[:, 1])


def from_pairs(rows: torch.Tensor) -> torch.Tensor:
    """Inverse of `to_pairs`: complex [heads, pairs, hidden] -> fp64 [heads * 2 pairs, hidden]."""
    return torch.stack((rows.real, rows.imag), 1).flatten(0, 2)


def rows_of_pairs(kept: torch.Tensor, pairs: int) -> torch.Tensor:
    """The rows [heads * 2 n] that `from_pairs` gives for the pairs `kept` [heads, n] of each head.

    Each head has `pairs` pairs.
    """
    first = torch.arange(len(kept), device=kept.device)[:, None] * 2 * pairs
    return torch.cat((first + kept, first + pairs + kept), 1).flatten()


def pair_energy(rows: torch.Tensor, covariance: torch.Tensor) -> torch.Tensor:
    """E|z x|^2 [heads, pairs] of complex rows z [heads, pairs, hidden]; x has `covariance`."""
    c = covariance.double()
    return (rows.real @ c * rows.real + rows.imag @ c * rows.imag).sum(-1)


def query_demand(
    query: torch.Tensor, covariance: torch.Tensor, key_heads: int, pairs: int
) -> torch.Tensor:
    """E|q_f|^2 [key_heads, pairs], summed over the query heads that share a key head.

    query [query_heads * 2 pairs, hidden]. The result is kept above zero, because it is a divisor.
    """
    energy = pair_energy(to_pairs(query, -1, pairs), covariance)
    demand = energy.view(key_heads, -1, pairs).sum(1)
    return demand.clamp_min((demand.max() * 1e-12).clamp_min(1e-30))


def turned(moments: torch.Tensor, inv_freq: torch.Tensor) -> torch.Tensor:
    """E[R q q^T R^T] [heads, D, D], where RoPE turns queries q by their offset from the keys.

    `moments` E[q q^T] [heads, D, D], inv_freq [D / 2]. Offsets t are as in a causal sequence of
    `_OFFSETS` tokens T: their density is 2 (T - t) / T^2.
    """
    inv_freq = inv_freq.to(moments)
    cos_of_sum, sin_of_sum = _mean_cos_and_sin(inv_freq[:, None] + inv_freq)
    cos_of_difference, sin_of_difference = _mean_cos_and_sin(inv_freq[:, None] - inv_freq)
    # Means of products of cos and sin of two pairs' angles.
    cos_cos, sin_sin = (cos_of_difference + cos_of_sum) / 2, (cos_of_difference - cos_of_sum) / 2
    cos_sin = (sin_of_sum - sin_of_difference) / 2
    pairs = len(inv_freq)
    upper, c = moments[:, :pairs], moments[:, pairs:, pairs:]
    a, b = upper[..., :pairs], upper[..., pairs:]
    first = cos_cos * a - cos_sin * b - cos_sin.T * b.mT + sin_sin * c
    mixed = cos_sin * a + cos_cos * b - sin_sin * b.mT - cos_sin.T * c
    second = sin_sin * a + cos_sin.T * b + cos_sin * b.mT + cos_cos * c
    return torch.cat((torch.cat((first, mixed), 2), torch.cat((mixed.mT, second), 2)), 1)


def _mean_cos_and_sin(frequencies: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """E[cos(w t)] and E[sin(w t)] of every frequency w, for offsets t as in `turned`."""
    angles = frequencies * _OFFSETS
    far = angles.abs() > 1e-3
    x = angles.where(far, 1.0)
    return (angles / (2 * math.pi)).sinc().square(), (2 * (x - x.sin()) / x**2).where(
        far, angles / 3
    )


def with_bias(weights: Mapping[str, torch.Tensor], linear: str) -> torch.Tensor:
    """The weight of `linear` [out, in]; with a bias [out, in + 1], whose last column it is."""
    weight, bias = weights[f"{linear}.weight"], weights.get(f"{linear}.bias")
    return weight if bias is None else torch.cat((weight, bias.to(weight)[:, None]), 1)


def without_bias(
    weights: Mapping[str, torch.Tensor], linear: str, joined: torch.Tensor
) -> dict[str, torch.Tensor]:
    """The tensors of `linear` of which `joined` is made as by `with_bias`, by their names.

    `weights` say whether the linear has a bias.
    """
    if f"{linear}.bias" not in weights:
        return {f"{linear}.weight": joined}
    return {f"{linear}.weight": joined[:, :-1], f"{linear}.bias": joined[:, -1]}

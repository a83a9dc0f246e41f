"""Projections as methods see them: biases are columns, and pairs of rows are complex rows.

W x + b is [W b] times x with a 1 appended. Statistics of the input of biased q, k and v projections
have that 1, too (compression/statistics_file.py). So whatever a method does to rows of W it does to
the bias, and its errors count the bias.

RoPE sees the rows f and f + P of a head as one complex row: it multiplies pair f at position t by
exp(i t inv_freq[f]). The logit of a query and a key is Re(sum_f conj(q_f) k_f).
"""

from collections.abc import Mapping

import torch


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

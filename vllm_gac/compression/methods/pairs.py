"""A projection as RoPE sees it: the rows f and f + P of a head form one complex row.

RoPE multiplies pair f at position t by exp(i t inv_freq[f]). The logit of a query and a key is
Re(sum_f conj(q_f) k_f).
"""

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
    return demand.clamp_min(demand.max() * 1e-12)

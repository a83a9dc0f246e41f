"""Smaller rotary keys: drop RoPE pairs, chosen for each key head."""

from dataclasses import dataclass

import torch

from vllm_gac.compression.methods.pairs import from_pairs, pair_energy, query_demand, to_pairs


@dataclass(frozen=True, slots=True)
class RotaryKeys:
    """query [query_heads * size, hidden], key [heads * size, hidden], inv_freq [heads, size/2]."""

    query: torch.Tensor
    key: torch.Tensor
    inv_freq: torch.Tensor


def select_pairs(
    query: torch.Tensor,
    key: torch.Tensor,
    covariance: torch.Tensor,
    inv_freq: torch.Tensor,
    key_heads: int,
    size: int,
) -> RotaryKeys:
    """Keep the size/2 pairs of each key head that have the largest E|q_f|^2 E|k_f|^2.

    query [query_heads * D, hidden] and key [key_heads * D, hidden] with input covariance
    [hidden, hidden]; inv_freq [D / 2]. A pair's logit contribution is Re(conj(q_f) k_f), turned
    by a phase that is spread over the circle, so its second moment is half of that product.
    Exact for the pairs that are kept; the softmax scale does not change.
    """
    keys = to_pairs(key, key_heads, inv_freq.numel())
    queries = to_pairs(query, -1, inv_freq.numel())
    scores = pair_scores(query, key, covariance, key_heads)
    kept = scores.topk(size // 2, dim=1).indices.sort(dim=1).values
    per_query = kept.repeat_interleave(queries.shape[0] // key_heads, 0)
    return RotaryKeys(
        query=from_pairs(_take(queries, per_query)),
        key=from_pairs(_take(keys, kept)),
        inv_freq=inv_freq[kept],
    )


def pair_scores(
    query: torch.Tensor, key: torch.Tensor, covariance: torch.Tensor, key_heads: int
) -> torch.Tensor:
    """E|q_f|^2 E|k_f|^2 [key_heads, D / 2]: twice the logits' error if pair f is dropped."""
    pairs = key.shape[0] // key_heads // 2
    supply = pair_energy(to_pairs(key, key_heads, pairs), covariance)
    return supply * query_demand(query, covariance, key_heads, pairs)


def _take(pairs: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Rows `kept` [heads, n] of each head of `pairs` [heads, P, hidden]."""
    return torch.gather(pairs, 1, kept[:, :, None].expand(-1, -1, pairs.shape[2]))

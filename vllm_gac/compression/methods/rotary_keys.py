"""Smaller rotary keys: drop RoPE pairs, chosen for each key head."""

from dataclasses import dataclass

import torch

from vllm_gac.compression.methods.pairs import (
    from_pairs,
    pair_energy,
    query_demand,
    rows_of_pairs,
    to_pairs,
)


@dataclass(frozen=True, slots=True)
class RotaryKeys:
    """Smaller rotary keys, and the queries that go with them.

    Attributes:
        query: q_proj, [query_heads * size, hidden].
        key: k_proj, [heads * size, hidden].
        inv_freq: The RoPE frequencies of each key head, [heads, size / 2].
        query_rows: Which rows of the dense q_proj these are; None if they are mixtures of rows.
        key_rows: The same of k_proj.
    """

    query: torch.Tensor
    key: torch.Tensor
    inv_freq: torch.Tensor
    query_rows: torch.Tensor | None = None
    key_rows: torch.Tensor | None = None


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
        query_rows=rows_of_pairs(per_query, inv_freq.numel()),
        key_rows=rows_of_pairs(kept, inv_freq.numel()),
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

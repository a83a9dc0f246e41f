"""Latent keys (PaLU, Chang et al., ICLR 2025): cache low-rank latents instead of keys."""

import torch

from vllm_gac.compression.methods.factorization import Factorization, factorize
from vllm_gac.compression.methods.pairs import query_demand


def latent_keys(
    query: torch.Tensor,
    key: torch.Tensor,
    covariance: torch.Tensor,
    key_heads: int,
    group: int,
    size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Latents of `size` elements for each `group` of the model's `key_heads`.

    query [query_heads * D, hidden] and key [key_heads * D, hidden] with input covariance
    [hidden, hidden] -> down [key_heads / group * size, hidden], which replaces k_proj, and up
    [key_heads / group, group * D, size], from which keys are rebuilt before RoPE. The latents are
    uncorrelated and of unit variance, so that any cache dtype suits them.

    Unlike in PaLU, errors of the keys are weighted by the queries. RoPE turns a query against a
    key by phases that are spread over the circle, so that only the energy per pair remains of the
    queries' covariance.
    """
    factors = latent_factors(query, key, covariance, key_heads, group)
    ups, downs = zip(*(f.truncate(size) for f in factors), strict=True)
    return torch.cat(downs), torch.stack(ups)


def latent_factors(
    query: torch.Tensor, key: torch.Tensor, covariance: torch.Tensor, key_heads: int, group: int
) -> list[Factorization]:
    """The factorized keys of each group, weighted by the energy of its queries."""
    demand = query_demand(query, covariance, key_heads, key.shape[0] // key_heads // 2)
    weight = torch.cat((demand, demand), 1).flatten()  # both rows of a pair
    groups = key_heads // group
    return [
        factorize(rows, covariance, torch.diag(row_weight))
        for rows, row_weight in zip(key.chunk(groups), weight.chunk(groups), strict=True)
    ]

"""Latent keys (PaLU, Chang et al., ICLR 2025): cache what the key heads are made of."""

import torch

from vllm_gac.methods.lowrank import factorize
from vllm_gac.methods.pairs import pair_energy, to_pairs


def latent_keys(
    query: torch.Tensor,
    key: torch.Tensor,
    covariance: torch.Tensor,
    key_heads: int,
    group: int,
    size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Latents of `size` numbers for each `group` of the model's `key_heads`.

    query [query_heads * D, hidden] and key [key_heads * D, hidden] with input covariance
    [hidden, hidden] -> down [key_heads / group * size, hidden], which replaces k_proj, and up
    [key_heads / group, group * D, size], from which keys are rebuilt before RoPE. The latents are
    uncorrelated and of unit variance, so that any cache dtype suits them.

    Unlike PaLU's, errors of the keys count by what queries ask of them. A query meets a key under
    phases that RoPE spreads over the circle, which leaves of its covariance the energy per pair.
    """
    pairs = key.shape[0] // key_heads // 2
    demand = pair_energy(to_pairs(query, -1, pairs), covariance).view(key_heads, -1, pairs).sum(1)
    demand = demand.clamp_min(demand.max() * 1e-12)
    weight = torch.cat((demand, demand), 1)  # both rows of a pair: [key_heads, D]
    ups, downs = [], []
    for rows, row_weight in zip(
        key.chunk(key_heads // group), weight.flatten().chunk(key_heads // group), strict=True
    ):
        up, down = factorize(rows, covariance, torch.diag(row_weight)).truncate(size)
        ups.append(up)
        downs.append(down)
    return torch.cat(downs), torch.stack(ups)

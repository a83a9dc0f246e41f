"""Smaller and fewer rotary keys.

RoPE pairs are dropped, chosen for each key head; or the heads of a group are mixed first, one RoPE
frequency at a time.
"""

from dataclasses import dataclass

import torch

from vllm_gac.compression.methods.heads.projections import (
    from_pairs,
    pair_energy,
    query_demand,
    to_pairs,
)


def pair_scores(
    query: torch.Tensor, key: torch.Tensor, covariance: torch.Tensor, key_heads: int
) -> torch.Tensor:
    """E|q_f|^2 E|k_f|^2 [key_heads, D / 2]: twice the logits' error if pair f is dropped."""
    pairs = key.shape[0] // key_heads // 2
    supply = pair_energy(to_pairs(key, key_heads, pairs), covariance)
    return supply * query_demand(query, covariance, key_heads, pairs)


def strongest(scores: torch.Tensor, size: int) -> torch.Tensor:
    """The size/2 pairs of each head [heads, size / 2] that have the largest scores, rising.

    A pair's logit contribution is Re(conj(q_f) k_f), turned by a phase that is spread over the
    circle, so its second moment is half of E|q_f|^2 E|k_f|^2. Exact for the pairs that are kept;
    the softmax scale does not change.
    """
    return scores.topk(size // 2, dim=1).indices.sort(dim=1).values


def mix_pairs(
    query: torch.Tensor,
    key: torch.Tensor,
    covariance: torch.Tensor,
    inv_freq: torch.Tensor,
    key_heads: int,
    group: int,
    size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Merge each `group` of the model's `key_heads` into one key head of `size`.

    query [query_heads * D, hidden], key [key_heads * D, hidden], covariance [hidden, hidden],
    inv_freq [D / 2]. RoPE turns pair f of every head by the same phase, so that it commutes with a
    complex matrix across heads. For each group and pair, this matrix holds the principal axes of
    the keys, where each head is weighted by the energy of its queries in that pair. The group
    keeps the size/2 strongest of its (pair, axis) components. With all components, the logits are
    exact.

    Returns q_proj [query_heads * size, hidden], k_proj [key_heads / group * size, hidden], and the
    RoPE frequencies of each key head [key_heads / group, size / 2].
    """
    pairs, groups = inv_freq.numel(), key_heads // group
    keys = to_pairs(key, key_heads, pairs).view(groups, group, pairs, -1)
    queries = to_pairs(query, -1, pairs)
    queries = queries.view(
        groups, group, -1, pairs, queries.shape[-1]
    )  # axis 2: query heads that share a key head

    axes = principal_axes(query, key, covariance, key_heads, group)
    to_key = axes.vectors.conj() * axes.weight[..., None]  # [groups, pairs, group, axes]
    to_query = axes.vectors.conj() / axes.weight[..., None]
    mixed_keys = torch.einsum("gfjc,gjfd->gfcd", to_key, keys).flatten(1, 2)
    mixed_queries = torch.einsum("gfjc,gjsfd->gjsfcd", to_query, queries).flatten(3, 4)

    kept = strongest(axes.strength, size)
    chosen = [m[:, :, k].flatten(0, 1) for m, k in zip(mixed_queries, kept, strict=True)]
    return (
        from_pairs(torch.cat(chosen)),
        from_pairs(torch.stack([m[k] for m, k in zip(mixed_keys, kept, strict=True)])),
        inv_freq[kept // group],
    )


@dataclass(frozen=True, slots=True)
class PrincipalAxes:
    """The principal axes of each pair across the heads of a group.

    Attributes:
        vectors: The axes, complex [groups, pairs, group, group].
        weight: The weight of each head, [groups, pairs, group].
        strength: The strength of each component, [groups, pairs * group], in the unit of
            `pair_scores`.
    """

    vectors: torch.Tensor
    weight: torch.Tensor
    strength: torch.Tensor


def principal_axes(
    query: torch.Tensor, key: torch.Tensor, covariance: torch.Tensor, key_heads: int, group: int
) -> PrincipalAxes:
    """The best way to mix the heads of every group; arguments as in `mix_pairs`."""
    groups, pairs = key_heads // group, key.shape[0] // key_heads // 2
    keys = to_pairs(key, key_heads, pairs).view(groups, group, pairs, -1)
    demand = query_demand(query, covariance, key_heads, pairs)
    demand = demand.view(groups, group, pairs).transpose(1, 2)
    # The geometric mean over the heads is needed only to compare pairs. Without it, the weights
    # rescale neither queries nor keys.
    common = demand.log().mean(-1, keepdim=True).exp()
    weight = (demand / common).sqrt()
    moment = torch.einsum("gjfd,de,gkfe->gfjk", keys, covariance.to(keys.dtype), keys.conj())
    strength, vectors = torch.linalg.eigh(weight[..., :, None] * moment * weight[..., None, :])
    return PrincipalAxes(vectors, weight, (strength * common).flatten(1))

"""Smaller keys where query heads and key heads are normed before RoPE (Qwen3).

RMSNorm divides a whole head by its root mean square. Dropping a pair afterwards leaves the others
as they were, so the pairs that are kept are exact; but the statistic needs whole heads, so that
q_proj and k_proj keep their size, and only the cache becomes smaller.

The mean square does not depend on the order of the rows. So the rows of each head are put into an
order in which the kept pairs come first, and what follows the norm takes the first pairs of each
half of a head (layout/qk_norm.py). Query heads have the order of their key head.

A latent for each head makes k_proj smaller, too. Where a head is U times its latent and U has
orthonormal columns, both have the same sum of squares. The norm then divides the latent, which is
cached, and the weight of the norm is part of the up-projection: w * U c / rms(U c) is
diag(w) U times c / rms(U c). Several heads have a divisor each, so they share no latent.
"""

import torch

from vllm_gac.compression.methods.base import MeasuredLayer
from vllm_gac.compression.methods.factorization import Factorization, factorize
from vllm_gac.compression.methods.heads.projections import rows_of_pairs
from vllm_gac.compression.methods.statistics import NORMED_KEYS, QUERY_ENERGY


def normed_pair_scores(layer: MeasuredLayer) -> torch.Tensor:
    """The scores of the pairs of each key head, by which they are kept.

    Returns:
        E|q_f|^2 E|k_f|^2 [key heads, pairs], summed over the query heads that share a key head:
        twice the logits' error if pair f is dropped, as `pair_scores` of rotary_keys.py.
    """
    heads = layer.layout.num_key_value_heads
    weight = layer.weights["self_attn.k_norm.weight"].double()
    energy = layer.covariances[NORMED_KEYS].diagonal().view(heads, -1) * weight.square()
    return energy.view(heads, 2, -1).sum(1) * layer.covariances[QUERY_ENERGY].view(heads, -1)


def select_normed_pairs(
    layer: MeasuredLayer, size: int
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Keep the size/2 pairs of each key head that have the largest scores.

    Args:
        layer: The dense layer.
        size: The size of a cached key, even.

    Returns:
        q_proj and k_proj with their rows in another order, q_norm and k_norm [key heads, size],
        and the frequencies of the kept pairs [key heads, size / 2]. The order of the rows of both
        projections, by "self_attn.q_proj" and "self_attn.k_proj".
    """
    scores = normed_pair_scores(layer)
    key_heads, pairs = scores.shape
    order = scores.argsort(dim=1, descending=True, stable=True)
    kept, rest = order[:, : size // 2].sort(1).values, order[:, size // 2 :].sort(1).values
    order = torch.cat((kept, rest), 1)
    selected = {"self_attn.rope_inv_freq": layer.inv_freq[kept]}
    rows = {}
    for name in ("self_attn.q_proj", "self_attn.k_proj"):
        weight = layer.weights[f"{name}.weight"]
        heads = len(weight) // (2 * pairs)
        rows[name] = rows_of_pairs(order.repeat_interleave(heads // key_heads, 0), pairs)
        selected[f"{name}.weight"] = weight.double()[rows[name]]
    for name in ("self_attn.q_norm.weight", "self_attn.k_norm.weight"):
        halves = layer.weights[name].view(2, pairs)
        selected[name] = torch.cat((halves[0][kept], halves[1][kept]), 1)
    return selected, rows


def normed_latents(layer: MeasuredLayer, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A latent of `size` elements for each key head.

    Returns:
        down [key heads * size, hidden], which replaces k_proj, and up [key heads, D, size], from
        which keys are rebuilt before their norm. The columns of each head of up are orthonormal.
    """
    keys = layer.weights["self_attn.k_proj.weight"].double()
    ups, downs = [], []
    for head, factors in zip(
        keys.chunk(layer.layout.num_key_value_heads), normed_latent_factors(layer), strict=True
    ):
        up, down = factors.truncate(size)
        orthonormal, triangular = torch.linalg.qr(up)
        ups.append(orthonormal)
        downs.append(triangular @ down @ head)
    return torch.cat(downs), torch.stack(ups)


def normed_latent_factors(layer: MeasuredLayer) -> list[Factorization]:
    """The factorized identity [D, D] of each key head before its norm.

    Keys count by their covariance after the norm, and their errors by the energy of the queries
    and by the weight of the norm.
    """
    heads, size = layer.layout.num_key_value_heads, layer.layout.head_dim
    weight = layer.weights["self_attn.k_norm.weight"].double().square()
    demand = layer.covariances[QUERY_ENERGY].view(heads, -1).repeat(1, 2) * weight
    by_head = layer.covariances[NORMED_KEYS].view(heads, size, heads, size)
    identity = torch.eye(size, dtype=torch.float64, device=weight.device)
    return [
        factorize(identity, by_head[head, :, head], torch.diag(demand[head]))
        for head in range(heads)
    ]

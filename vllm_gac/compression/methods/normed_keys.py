"""Smaller rotary keys where query heads and key heads are normed before RoPE (Qwen3).

RMSNorm divides a whole head by its root mean square. Dropping a pair afterwards leaves the others
as they were, so the pairs that are kept are exact; but the statistic needs whole heads, so that
q_proj and k_proj keep their size, and only the cache becomes smaller.

The mean square does not depend on the order of the rows. So the rows of each head are put into an
order in which the kept pairs come first, and what follows the norm takes the first pairs of each
half of a head (layout/qk_norm.py). Query heads have the order of their key head.
"""

from collections.abc import Mapping

import torch

from vllm_gac.compression.methods.pairs import rows_of_pairs

# The name of the pairs' scores among the statistics of a layer.
PAIR_SCORES = "pair_scores"


def normed_pair_scores(query_energy: torch.Tensor, key_energy: torch.Tensor) -> torch.Tensor:
    """The scores of the pairs of each key head, by which they are kept.

    Args:
        query_energy: E|q_f|^2 of each query head after its norm, [query heads, pairs].
        key_energy: The same of each key head, [key heads, pairs].

    Returns:
        E|q_f|^2 E|k_f|^2 [key heads, pairs], summed over the query heads that share a key head:
        twice the logits' error if pair f is dropped, as `pair_scores` of rotary_keys.py.
    """
    demand = query_energy.view(len(key_energy), -1, key_energy.shape[1]).sum(1)
    return demand * key_energy


def select_normed_pairs(
    weights: Mapping[str, torch.Tensor],
    scores: torch.Tensor,
    inv_freq: torch.Tensor,
    size: int,
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Keep the size/2 pairs of each key head that have the largest `scores`.

    Args:
        weights: The layer's tensors.
        scores: [key heads, D / 2].
        inv_freq: The model's RoPE frequencies, [D / 2].
        size: The size of a cached key, even.

    Returns:
        q_proj and k_proj with their rows in another order, q_norm and k_norm [key heads, size],
        and the frequencies of the kept pairs [key heads, size / 2]. The order of the rows of both
        projections, by "self_attn.q_proj" and "self_attn.k_proj".
    """
    key_heads, pairs = scores.shape
    order = scores.argsort(dim=1, descending=True, stable=True)
    kept, rest = order[:, : size // 2].sort(1).values, order[:, size // 2 :].sort(1).values
    order = torch.cat((kept, rest), 1)
    found = {"self_attn.rope_inv_freq": inv_freq[kept]}
    rows = {}
    for name in ("self_attn.q_proj", "self_attn.k_proj"):
        weight = weights[f"{name}.weight"]
        heads = len(weight) // (2 * pairs)
        rows[name] = rows_of_pairs(order.repeat_interleave(heads // key_heads, 0), pairs)
        found[f"{name}.weight"] = weight.double()[rows[name]]
    for name in ("self_attn.q_norm.weight", "self_attn.k_norm.weight"):
        halves = weights[name].view(2, pairs)
        found[name] = torch.cat((halves[0][kept], halves[1][kept]), 1)
    return found, rows

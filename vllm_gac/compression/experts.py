"""A mixture of experts in plain torch: each token goes to the few experts that suit it best."""

from collections.abc import Mapping

import torch
from torch.nn.functional import linear, silu

from vllm_gac.layout.schema import Experts


def mixed_experts(
    experts: Experts, weights: Mapping[str, torch.Tensor], normed: torch.Tensor
) -> torch.Tensor:
    """What the experts of a layer make of its normed states.

    Args:
        experts: How many there are, and how many a token goes to.
        weights: The layer's tensors, by their names within the layer.
        normed: [batch, tokens, hidden].

    Returns:
        [batch, tokens, hidden]: the sum of each token's experts, weighted by their shares of the
        softmax, which is computed in fp32 at least, as engines do.
    """
    rows = normed.flatten(0, -2)
    precise = torch.promote_types(rows.dtype, torch.float32)
    shares = linear(rows, weights["mlp.gate.weight"]).softmax(-1, dtype=precise)
    shares, chosen = shares.topk(experts.num_experts_per_tok)
    if experts.norm_topk_prob:
        shares = shares / shares.sum(-1, keepdim=True)
    mixed = torch.zeros_like(rows)
    for expert in range(experts.num_experts):
        tokens, place = torch.where(chosen == expert)
        if not len(tokens):
            continue
        gate, up, down = (weights[f"mlp.experts.{expert}.{x}_proj.weight"] for x in _LINEARS)
        output = linear(silu(linear(rows[tokens], gate)) * linear(rows[tokens], up), down)
        share = shares[tokens, place, None].to(rows.dtype)
        mixed.index_add_(0, tokens, share * output)
    return mixed.view(normed.shape)


_LINEARS = ("gate", "up", "down")

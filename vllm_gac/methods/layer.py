"""One decoder layer from its dense weights and statistics to the dims of a plan."""

from collections.abc import Mapping

import torch

from vllm_gac.errors import PlanError
from vllm_gac.layout import LayerLayout, ModelLayout
from vllm_gac.methods.latent_keys import latent_keys
from vllm_gac.methods.lowrank import Whitening, low_rank
from vllm_gac.methods.mixed_keys import mix_pairs
from vllm_gac.methods.prune import prune_channels
from vllm_gac.methods.rotary_keys import select_pairs
from vllm_gac.methods.values import merge_values, own_columns
from vllm_gac.stats import LayerStats

Weights = Mapping[str, torch.Tensor]


def compress_layer(
    dense: ModelLayout,
    target: LayerLayout,
    weights: Weights,
    stats: LayerStats,
    inv_freq: torch.Tensor,
    whitening: Whitening = "svd-llm",
) -> dict[str, torch.Tensor]:
    """The tensors of a layer of `target` dims, by their name within the layer.

    weights and stats are the dense layer's; inv_freq [head_dim / 2] are the model's frequencies.
    What does not shrink is returned as the very tensor it was; the rest is fp64, RoPE tables fp32.
    Raises PlanError if no method leads from the dense layer to `target`.
    """
    smaller, covariances = dict(weights), dict(stats)
    _values(dense, target, smaller, covariances)
    _keys(dense, target, smaller, covariances, inv_freq)
    _mlp(dense, target, smaller, covariances)
    for name, rank in target.ranks.items():
        covariance = covariances[_INPUT_OF.get(name, name)]
        a, b = low_rank(smaller.pop(f"{name}.weight"), covariance, rank, whitening)
        smaller[f"{name}.A.weight"], smaller[f"{name}.B.weight"] = a, b
    return smaller


# Linears that share their input with the one whose covariance was taken.
_INPUT_OF = {
    "self_attn.k_proj": "self_attn.q_proj",
    "self_attn.v_proj": "self_attn.q_proj",
    "mlp.up_proj": "mlp.gate_proj",
}


def _values(
    dense: ModelLayout,
    target: LayerLayout,
    weights: dict[str, torch.Tensor],
    covariances: dict[str, torch.Tensor],
) -> None:
    heads = dense.num_key_value_heads
    value, output = weights["self_attn.v_proj.weight"], weights["self_attn.o_proj.weight"]
    covariance = covariances["self_attn.o_proj"]
    spanned = len(covariance) // (dense.num_attention_heads * dense.head_dim)
    group = heads // target.value.heads
    if group not in (1, spanned) or heads % target.value.heads:
        raise PlanError(
            f"{target.value.heads} value heads cannot be made of {heads} with statistics of "
            f"{spanned} at a time"
        )
    if group == 1 and spanned > 1:
        own = own_columns(dense.num_attention_heads, heads, dense.head_dim, spanned)
        covariance = covariance[own][:, own]
    if (target.value.heads, target.value.size) != (heads, dense.head_dim):
        value, output, covariance = merge_values(
            value, output, covariance, heads, group, target.value.size
        )
    weights |= {"self_attn.v_proj.weight": value, "self_attn.o_proj.weight": output}
    covariances["self_attn.o_proj"] = covariance


def _keys(
    dense: ModelLayout,
    target: LayerLayout,
    weights: dict[str, torch.Tensor],
    covariances: Mapping[str, torch.Tensor],
    inv_freq: torch.Tensor,
) -> None:
    heads, size = target.key.heads, target.key.size
    query, key = weights["self_attn.q_proj.weight"], weights["self_attn.k_proj.weight"]
    covariance, group = covariances["self_attn.q_proj"], dense.num_key_value_heads // heads
    if dense.num_key_value_heads % heads or size > group * dense.head_dim:
        raise PlanError(
            f"{heads} key heads of {size} cannot be made of "
            f"{dense.num_key_value_heads} of {dense.head_dim}"
        )
    if target.key.form == "latent":
        down, up = latent_keys(query, key, covariance, dense.num_key_value_heads, group, size)
        weights |= {"self_attn.k_proj.weight": down, "self_attn.k_up_proj.weight": up}
    elif group > 1 or size < dense.head_dim or target.key.rope_table:
        rotary = (
            mix_pairs(query, key, covariance, inv_freq, dense.num_key_value_heads, group, size)
            if group > 1
            else select_pairs(query, key, covariance, inv_freq, heads, size)
        )
        weights |= {
            "self_attn.q_proj.weight": rotary.query,
            "self_attn.k_proj.weight": rotary.key,
            "self_attn.rope_inv_freq": rotary.inv_freq,
        }


def _mlp(
    dense: ModelLayout,
    target: LayerLayout,
    weights: dict[str, torch.Tensor],
    covariances: dict[str, torch.Tensor],
) -> None:
    full = dense.layers[0].intermediate_size
    if target.intermediate_size > full:
        raise PlanError(f"intermediate_size {target.intermediate_size} exceeds the dense {full}")
    if target.intermediate_size == full:
        return
    gate, up, down, kept = prune_channels(
        weights["mlp.gate_proj.weight"],
        weights["mlp.up_proj.weight"],
        weights["mlp.down_proj.weight"],
        covariances["mlp.down_proj"],
        target.intermediate_size,
    )
    weights |= {
        "mlp.gate_proj.weight": gate,
        "mlp.up_proj.weight": up,
        "mlp.down_proj.weight": down,
    }
    covariances["mlp.down_proj"] = covariances["mlp.down_proj"][kept][:, kept]

"""Models in the form of PaLU."""

from typing import Any

from torch import nn

from tests.importers.tools import PaluLinear, dense, replace

Ranks = dict[str, list[int]]


def ranks_of(layers: list[tuple[list[int], list[int]]]) -> Ranks:
    """`head_wise_ranks` from the ranks of (keys, values) of each layer."""
    ranks = {}
    for index, (keys, values) in enumerate(layers):
        prefix = f"model.layers.{index}.self_attn."
        ranks |= {f"{prefix}k_proj": keys, f"{prefix}v_proj": values}
    return {name: groups for name, groups in ranks.items() if groups}


def palu(raw: dict[str, Any], ranks: Ranks) -> tuple[dict[str, Any], nn.Module]:
    """The config.json that PaLU writes, and the model."""
    model = dense(raw)
    for name, groups in ranks.items():
        replace(model, name, lambda linear, groups=groups: PaluLinear(linear, groups))
    family = raw["model_type"]
    return {
        **raw,
        "model_type": f"palu{family}" if family in ("llama", "mistral") else family,
        "architectures": [f"Palu{family.capitalize()}ForCausalLM"],
        "head_wise_ranks": ranks,
        "original_model_name_or_path": "meta-llama/Llama-2-7b-hf",
    }, model

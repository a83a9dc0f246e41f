"""Models whose layers differ in their dims."""

import copy
from typing import Any

import torch
from torch import nn

from tests.importers.tools import dense

Dims = dict[str, Any]


class NoAttention(nn.Module):
    """Takes the place of the attention, and of its norm, in a layer without attention."""

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, None]:
        return torch.zeros_like(hidden_states), None


class NoMLP(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(x)


def heterogeneous(raw: dict[str, Any], layers: list[Dims]) -> nn.Module:
    """The model of `raw` with `layers`. A layer has dims by transformers' keys, and `skip`."""
    model = dense(raw)
    torch.manual_seed(1)
    for index, dims in enumerate(layers):
        layer = model.get_submodule(f"model.layers.{index}")
        own = copy.deepcopy(model.config)
        for key, dim in dims.items():
            setattr(own, key, dim)
        if dims:
            layer.self_attn = type(layer.self_attn)(own, index)
            layer.mlp = type(layer.mlp)(own)
        if "attention" in dims.get("skip", ()):
            layer.self_attn, layer.input_layernorm = NoAttention(), nn.Identity()
        if "mlp" in dims.get("skip", ()):
            layer.mlp, layer.post_attention_layernorm = NoMLP(), nn.Identity()
    return model.eval()

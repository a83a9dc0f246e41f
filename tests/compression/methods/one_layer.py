"""One random decoder layer in fp64 with its statistics, for the methods to compress."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from tests.support.dense_models import LLAMA3_ROPE, config, weights
from vllm_gac.compression.measured import LayerStats
from vllm_gac.compression.methods.base import MeasuredLayer
from vllm_gac.compression.methods.registry import compress_layer
from vllm_gac.compression.passes import observe_layer
from vllm_gac.compression.reference_model import Reference, layer_forward, reference_of
from vllm_gac.layout.dims import KeyLayout, LayerLayout, ModelLayout, ValueLayout, layout_of
from vllm_gac.layout.schema import HfConfig, validate

HEADS, KV_HEADS, HEAD_DIM, WIDTH = 8, 4, 16, 96


@dataclass(frozen=True)
class OneLayer:
    """A dense layer, inputs for it, and the statistics of calibration on these inputs."""

    model: Reference
    weights: Mapping[str, torch.Tensor]
    hidden: torch.Tensor
    stats: LayerStats

    @property
    def dense(self) -> LayerLayout:
        return self.model.layout.layers[0]

    @property
    def layout(self) -> ModelLayout:
        return self.model.layout

    def target(
        self,
        key: tuple[str, int, int] | None = None,
        value: tuple[int, int] | None = None,
        width: int | None = None,
        ranks: Mapping[str, int] | None = None,
    ) -> LayerLayout:
        """The dense layer with other dims: key (form, heads, size), value (heads, size)."""
        layer = self.dense
        if key:
            layer = replace(layer, key=KeyLayout(*key, rope_table=key[0] == "rotary"))
        if value:
            layer = replace(layer, value=ValueLayout(*value))
        return replace(layer, intermediate_size=width or WIDTH, ranks=ranks or {})

    @property
    def measured(self) -> MeasuredLayer:
        frequencies = self.model.inv_freq * self.dense.has_rope
        return MeasuredLayer(self.layout, self.weights, self.stats, frequencies)

    def compressed(self, target: LayerLayout) -> dict[str, torch.Tensor]:
        return compress_layer(self.measured, target)

    def output(self, target: LayerLayout | None = None) -> torch.Tensor:
        """What the layer adds to its input, if it is dense or compressed to `target`."""
        small = self.compressed(target) if target else self.weights
        return layer_forward(self.model, target or self.dense, small, self.hidden) - self.hidden

    def error(self, target: LayerLayout) -> float:
        """The mean squared change of the output by compression, relative to its mean square."""
        dense = self.output()
        return float((self.output(target) - dense).square().mean() / dense.square().mean())


def one_layer(kv_heads: int = KV_HEADS, **changes: Any) -> OneLayer:
    """A layer with llama3 RoPE. Its inputs vary more in some directions than in others."""
    raw = config(
        hidden_size=72,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        num_key_value_heads=kv_heads,
        rope_parameters=LLAMA3_ROPE,
        **changes,
    )
    model = reference_of(layout_of(raw), validate(HfConfig, raw, "config.json"), torch.float64)
    tensors = {
        name.removeprefix("model.layers.0."): tensor.double()
        for name, tensor in weights(raw).items()
        if name.startswith("model.layers.0.")
    }
    generator = torch.Generator().manual_seed(2)
    spread = torch.logspace(0, -2, 72, dtype=torch.float64)
    hidden = torch.randn(6, 60, 72, generator=generator, dtype=torch.float64) * spread
    stats, _ = observe_layer(model, 0, tensors, hidden, value_group=2)
    return OneLayer(model, tensors, hidden, stats)

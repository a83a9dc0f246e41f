"""Compressed models in transformers: import this, and its `AutoModelForCausalLM` loads them.

Each is the model of its family in transformers, which brings generation, masks, losses and
experts, with attention and MLPs of the layout's dims. Linear layers are modules, so hooks,
adapters and quantizers find them. The cache holds keys after RoPE, and latent keys as whole heads:
only vLLM has the small cache. Attention is torch's, whatever `attn_implementation` asks for.
"""

from typing import Any

import torch
import transformers
from torch import nn
from torch.nn.functional import scaled_dot_product_attention, silu
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import ConversionOps, WeightConverter

from vllm_gac.errors import CheckpointError
from vllm_gac.layout.dims import LayerLayout, ModelLayout, layout_in
from vllm_gac.layout.families import ARCHITECTURE, FAMILIES
from vllm_gac.layout.qk_norm import norm_heads, norm_latents
from vllm_gac.layout.rope import cos_sin, inverse_frequencies, of_queries, rotate
from vllm_gac.layout.schema import HfConfig, validate

Tensor = torch.Tensor


class _Compressed:
    """What a compressed model has in place of its family's modules."""

    _supports_flash_attn = _supports_flex_attn = False
    _keep_in_fp32_modules_strict = frozenset({"rope_inv_freq"})

    @classmethod
    def from_pretrained(cls, name: Any, *args: Any, config: Any, **options: Any) -> Any:
        """The model of a directory or of the Hub, as `AutoModelForCausalLM` loads it."""
        if getattr(config, "quantization_config", None):
            raise CheckpointError(
                f"{name}/config.json: quantization_config: vLLM alone takes compressed models that "
                "are quantized; load the model that was quantized"
            )
        return super().from_pretrained(  # type: ignore[misc]  # the family's class
            name, *args, config=config, **options
        )

    def __init__(self, config: Any) -> None:
        super().__init__(config)  # type: ignore[call-arg]  # the same
        checked = validate(HfConfig, config.to_dict(), "config.json")
        layout = layout_in(checked)
        layers = self.model.layers  # type: ignore[attr-defined]  # the same
        for index, (layer, dims) in enumerate(zip(layers, layout.layers, strict=True)):
            layer.self_attn = _Attention(layout, dims, checked, index)
            if not layout.experts:
                layer.mlp = _Mlp(layout, dims)

    def _get_static_cache_init_shape(self) -> None:
        """Let a static cache take each layer's shape from what it first stores."""


class _Attention(nn.Module):
    """The attention of a layer, as the reference model computes it, with a cache."""

    rope_inv_freq: Tensor

    def __init__(
        self, layout: ModelLayout, layer: LayerLayout, config: HfConfig, index: int
    ) -> None:
        super().__init__()
        self.layout, self.layer, self.config, self.index = layout, layer, config, index
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            _linear(layout, layer, f"self_attn.{name}_proj") for name in "qkvo"
        )
        key = layer.key
        if key.is_latent:
            rebuilt = layout.kv_heads_per(key) * layout.head_dim
            self.k_up_proj = _weight(key.heads, rebuilt, key.size)
        if layout.qk_norm:
            self.q_norm = _weight(*layout.norm_shape(layer))
            if not key.is_latent:
                self.k_norm = _weight(*layout.norm_shape(layer))
        if key.rope_table:
            table = torch.ones(key.heads, key.size // 2, dtype=torch.float32)
            self.register_buffer("rope_inv_freq", table)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Move or cast everything, but leave the RoPE table in fp32, as the format has it."""
        table = self._buffers.get("rope_inv_freq")
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch's
        if table is not None and self.rope_inv_freq.dtype != table.dtype:
            self.rope_inv_freq = table.to(self.rope_inv_freq.device)
        return self

    def forward(
        self,
        hidden_states: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **_: object,
    ) -> tuple[Tensor, None]:
        queries, keys = self._rotated(hidden_states, position_ids)
        values = self._heads(self.v_proj(hidden_states), self.layer.value.heads)
        keys, values = keys.transpose(1, 2), values.transpose(1, 2)
        if past_key_values is not None:
            if past_key_values.is_compileable:
                # A static cache takes as many values as keys. Others are smaller without copies.
                values = values.repeat_interleave(keys.shape[1] // values.shape[1], 1)
            keys, values = past_key_values.update(keys, values, self.index)
        attended = scaled_dot_product_attention(
            queries.transpose(1, 2),
            self._each_query(keys, 1),
            self._each_query(values, 1),
            attn_mask=attention_mask,
            is_causal=attention_mask is None and queries.shape[1] > 1,
            scale=self.layout.score_scale(self.layer),
        )
        return self.o_proj(attended.transpose(1, 2).flatten(-2)), None

    def _rotated(self, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys [batch, tokens, heads, size] after RoPE."""
        layer, layout, eps = self.layer, self.layout, self.config.rms_norm_eps
        queries = self._heads(self.q_proj(hidden), layer.query_heads)
        keys = self._heads(self.k_proj(hidden), layer.key.heads)
        if layout.qk_norm:
            queries = norm_heads(queries, self.q_norm["weight"], eps)
        if layer.key.is_latent:
            if layout.qk_norm:
                keys = norm_latents(keys, layout.head_dim, eps)
            keys = torch.einsum("bthr,hdr->bthd", keys, self.k_up_proj["weight"])
            keys = self._heads(keys.flatten(-2), layout.num_key_value_heads)
        elif layout.qk_norm:
            keys = norm_heads(keys, self.k_norm["weight"], eps)
        if layer.key.rope_table:
            table = self.rope_inv_freq
        else:
            table = inverse_frequencies(self.config.rope, layout.head_dim) * layer.has_rope
            table = table[None].to(hidden.device)
        flat = positions.flatten()
        turn = cos_sin(flat, table)
        of_key, of_query = (
            [t.to(hidden.dtype).view(*positions.shape, *t.shape[1:]) for t in pair]
            for pair in (turn, of_queries(flat, *turn, self.config.rope))
        )
        keys = rotate(keys, *of_key)
        return rotate(queries, *(self._each_query(t, 2) for t in of_query)), keys

    def _heads(self, x: Tensor, heads: int) -> Tensor:
        """[batch, tokens, heads, size] of [batch, tokens, heads * size]."""
        return x.view(*x.shape[:-1], heads, -1)

    def _each_query(self, x: Tensor, axis: int) -> Tensor:
        """Repeat each head for the query heads that share it."""
        return x.repeat_interleave(self.layer.query_heads // x.shape[axis], axis)


class _Mlp(nn.Module):
    """The MLP of a layer."""

    def __init__(self, layout: ModelLayout, layer: LayerLayout) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (
            _linear(layout, layer, f"mlp.{name}_proj") for name in ("gate", "up", "down")
        )

    def forward(self, hidden: Tensor) -> Tensor:
        output: Tensor = self.down_proj(silu(self.gate_proj(hidden)) * self.up_proj(hidden))
        return output


def _weight(*shape: int) -> nn.ParameterDict:
    """A `weight` that is no linear's."""
    return nn.ParameterDict({"weight": torch.ones(shape)})


def _linear(layout: ModelLayout, layer: LayerLayout, name: str) -> nn.Module:
    """A linear of a layer, or its factors A and B."""
    (out_size, in_size), has_bias = layout.linear_shape(layer, name), layout.has_bias(name)
    if (rank := layer.ranks.get(name)) is None:
        return nn.Linear(in_size, out_size, has_bias)
    factors = nn.Sequential()
    factors.add_module("A", nn.Linear(in_size, rank, bias=False))
    factors.add_module("B", nn.Linear(rank, out_size, has_bias))
    return factors


class _EachHead(ConversionOps):  # type: ignore[misc]  # transformers has no types
    """Repeat a RoPE table of one row for each key head."""

    def convert(
        self, input_dict: dict[str, Any], *, full_layer_name: str, model: Any, **_: Any
    ) -> dict[str, Any]:
        """As the base class; a table that has its rows stays as it is."""
        ((name, (table,)),) = input_dict.items()
        heads = len(model.get_buffer(full_layer_name))
        return {name: table.repeat(heads, 1) if len(table) == 1 else table}

    @property
    def reverse_op(self) -> ConversionOps:
        """A table to save has its rows."""
        return self


def _register() -> None:
    """Let `AutoModelForCausalLM` take `architectures` of config.json for what a model is."""
    table = "self_attn.rope_inv_freq"
    shared = WeightConverter(table, table, [_EachHead()])
    register_checkpoint_conversion_mapping(ARCHITECTURE, [shared], overwrite=True)
    for name, family in FAMILIES.items():
        dense = getattr(transformers, family.architecture)
        ours = type(ARCHITECTURE, (_Compressed, dense), {"__module__": __name__})
        mapping = AutoModelForCausalLM._model_mapping
        mapping.register(CONFIG_MAPPING[name], (dense, ours), exist_ok=True)


_register()

"""Random models with dims of every kind, mostly misaligned, and their logits."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from hypothesis import strategies as st

from tests.support.dense_models import LINEAR_ROPE, LLAMA3_ROPE, SCALED, config, random_weights
from vllm_gac.alignment.zero_padding import padded_tensors
from vllm_gac.compression.reference_model import logits, reference_of
from vllm_gac.layout import families as known
from vllm_gac.layout.dims import LINEARS, ModelLayout, layout_of
from vllm_gac.layout.schema import HfConfig, validate

HIDDEN, HEADS, KV_HEADS, LAYERS = 28, 4, 2, 2
TOKENS = (torch.arange(2 * 11).view(2, 11) * 37) % 32
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
# Keys of the dense size and a pruned head, latent keys, and low-rank linears.
MISALIGNED: list[dict[str, Any]] = [
    {
        "key": {"form": "rotary", "heads": 2, "size": 18},
        "value": {"heads": 1, "size": 13},
        "intermediate_size": 21,
        "ranks": {"self_attn.q_proj": 9, "mlp.down_proj": 13},
    },
    {
        "key": {"form": "latent", "heads": 1, "size": 11},
        "value": {"heads": 1, "size": 24},
        "intermediate_size": 32,
        "ranks": {"self_attn.k_proj": 10, "mlp.gate_proj": 16},
    },
]


@dataclass(frozen=True)
class RandomModel:
    """A model with random weights, made from a config.json with a `"gac"` object."""

    raw: dict[str, Any]
    seed: int

    @cached_property
    def layout(self) -> ModelLayout:
        return layout_of(self.raw)

    @cached_property
    def weights(self) -> dict[str, torch.Tensor]:
        return random_weights(self.layout.tensors().items(), self.seed)

    @property
    def hf_config(self) -> HfConfig:
        return validate(HfConfig, self.raw, "config.json")

    def padded(self, layout: ModelLayout) -> dict[str, torch.Tensor]:
        """The weights after padding to `layout`."""
        stream = padded_tensors(self.layout, layout, self.hf_config.rope, self.weights.items())
        return dict(stream)

    def logits(
        self,
        layout: ModelLayout | None = None,
        dtype: torch.dtype = torch.float64,
        change: Callable[[dict[str, torch.Tensor]], object] = lambda weights: None,
    ) -> torch.Tensor:
        """The logits of the reference model for TOKENS, unchanged or padded to `layout`."""
        weights = self.weights if layout is None else self.padded(layout)
        change(weights)
        reference = reference_of(layout or self.layout, self.hf_config, dtype)
        with torch.inference_mode():
            return logits(reference, weights.__getitem__, TOKENS)


FAMILIES: list[dict[str, Any]] = [
    {"model_type": "llama"},
    {"model_type": "mistral", "sliding_window": 5},
    {"model_type": "ministral3"},
    {"model_type": "qwen2"},
    {"model_type": "seed_oss"},
    {"model_type": "qwen3"},
    {"model_type": "qwen3_moe"},
    {"model_type": "smollm3"},
    {"model_type": "phi3"},
]
NORMED = ("qwen3", "qwen3_moe")


@st.composite
def layers(draw: st.DrawFn, head_dim: int, family: Mapping[str, Any]) -> dict[str, Any]:
    """Any layer that the model can have: rotary or latent, grouped, pruned, low rank."""
    form = draw(st.sampled_from(["rotary", "latent"]))
    query_heads = draw(st.sampled_from([2, 4] if form == "rotary" else [HEADS]))
    own_norm = family["model_type"] in NORMED and form == "latent"
    key_heads = draw(st.sampled_from([KV_HEADS] if own_norm else [1, 2]))
    own = draw(st.booleans()) and form == "rotary"
    pairs = draw(st.integers(1, head_dim))
    key_size = head_dim if own else 2 * pairs if form == "rotary" else pairs
    layer = {
        "key": {"form": form, "heads": key_heads, "size": key_size},
        "value": {
            "heads": draw(st.sampled_from([h for h in (1, 2) if key_heads % h == 0])),
            "size": draw(st.integers(1, 36)),
        },
        "intermediate_size": draw(st.integers(1, 36)),
        "query_heads": query_heads,
        "rope_table": form == "rotary" and (not own or draw(st.booleans())),
    }
    if family["model_type"] == "qwen3_moe":  # of which nothing else may differ
        return layer | {"intermediate_size": config(**family)["moe_intermediate_size"]}
    shapes = _shapes(layer, head_dim, family)
    names = draw(st.sets(st.sampled_from(LINEARS)))
    layer["ranks"] = {name: draw(st.integers(1, min(shapes[name]))) for name in sorted(names)}
    return layer


def _shapes(
    layer: dict[str, Any], head_dim: int, family: Mapping[str, Any]
) -> dict[str, tuple[int, int]]:
    layout = layout_of(gac_config([layer], head_dim, **family))
    return {name: layout.linear_shape(layout.layers[0], name) for name in LINEARS}


def gac_config(layers: list[dict[str, Any]], head_dim: int, **changes: Any) -> dict[str, Any]:
    """The config.json of a compressed model with `layers`."""
    gac = {"version": 1, "softmax_scale": head_dim**-0.5, "head_dim": head_dim, "layers": layers}
    return config(
        architectures=["GacLlamaForCausalLM"],
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        num_hidden_layers=len(layers),
        vocab_size=32,
        head_dim=head_dim,
        gac=gac,
        **changes,
    )


@st.composite
def models(draw: st.DrawFn) -> RandomModel:
    """A model with random layers, and random values of all attributes that the reference knows."""
    head_dim = draw(st.sampled_from([6, 10, 16, 18]))
    family = draw(st.sampled_from(FAMILIES))
    # A Phi-4 has default RoPE.
    other_ropes = [] if family["model_type"] == "phi3" else [LINEAR_ROPE, LLAMA3_ROPE]
    scaled = {**SCALED, "original_max_position_embeddings": 4}
    of_family = known.FAMILIES[family["model_type"]].qkv_bias
    biased = draw(st.booleans()) if of_family is None else of_family
    raw = gac_config(
        [draw(layers(head_dim, family)) for _ in range(LAYERS)],
        head_dim,
        rope_parameters=draw(st.sampled_from([DEFAULT_ROPE, *other_ropes]))
        | (scaled if family["model_type"] == "ministral3" else {}),
        attention_bias=biased,
        mlp_bias=draw(st.booleans()),
        tie_word_embeddings=draw(st.booleans()),
        **family,
    )
    return RandomModel(raw, draw(st.integers(0, 999)))

"""Writes small random gac models, with layers of every shape that the format allows."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.support.dense_models import SCALED
from vllm_gac import demo
from vllm_gac.layout.dims import ModelLayout, layout_of

HEAD_DIM, QUERY_HEADS, KV_HEADS = 64, 8, 4


def layer(
    key: tuple[str, int, int],
    value: tuple[int, int],
    width: int,
    ranks: dict[str, int] | None = None,
    **extra: Any,
) -> dict[str, Any]:
    """One layer's section: key (form, heads, size), value (heads, size), MLP width, ranks."""
    form, key_heads, key_size = key
    return {
        "key": {"form": form, "heads": key_heads, "size": key_size},
        "value": {"heads": value[0], "size": value[1]},
        "intermediate_size": width,
        "ranks": ranks or {},
        **extra,
    }


# Each layer has another shape.
HETEROGENEOUS = [
    layer(("rotary", 4, 64), (4, 64), 512),  # dense: stock attention
    layer(("rotary", 4, 48), (4, 32), 400),  # selected pairs, r_k > r_v
    layer(("rotary", 4, 32), (4, 80), 512),  # r_v > r_k
    layer(("rotary", 2, 64), (2, 96), 320, {"mlp.gate_proj": 64, "self_attn.o_proj": 80}),  # mixed
    layer(("rotary", 4, 64), (2, 64), 448),  # value heads shared by two key heads
    layer(("latent", 4, 32), (2, 48), 256, {"mlp.down_proj": 64, "self_attn.q_proj": 96}),
    layer(("latent", 2, 64), (2, 64), 512),  # one latent for two KV heads
    layer(("rotary", 2, 32), (2, 32), 128, query_heads=4),  # pruned heads
    layer(("rotary", 4, 58), (2, 35), 250, {"mlp.up_proj": 37}),  # misaligned: padded by default
]
# A model whose queries are scaled by their position.
MINISTRAL: dict[str, Any] = {
    "model_type": "ministral3",
    "rope_parameters": {"rope_theta": 10000.0, **SCALED},
}
# One without RoPE in its first and sixth layer.
SMOLLM: dict[str, Any] = {
    "model_type": "smollm3",
    "pad_token_id": None,
    "no_rope_layers": [0, 1, 1, 1, 1, 0, 1, 1, 1],
}
# Sizes that vLLM's CPU kernel for four bits takes, and groups of 32 divide.
ALIGNED = [
    layer(("rotary", 4, 64), (4, 64), 512),
    layer(("rotary", 4, 48), (4, 32), 384),
    layer(("rotary", 4, 64), (2, 64), 448),
    layer(("rotary", 4, 64), (4, 64), 512, {"self_attn.k_proj": 32, "self_attn.o_proj": 96}),
    layer(("latent", 4, 32), (2, 48), 256, {"mlp.down_proj": 64, "self_attn.q_proj": 96}),
]


def write_model(directory: Path, layers: list[dict[str, Any]], **config: Any) -> ModelLayout:
    """Write a reproducible random bf16 model of `layers` with the demo model's tokenizer."""
    directory.mkdir(parents=True, exist_ok=True)
    raw = _config(layers, **config)
    layout = layout_of(raw)
    raw["head_dim"] = layout.cache_head_dim
    (directory / "config.json").write_text(json.dumps(raw, indent=2))
    save_file(_weights(layout), directory / "model.safetensors", metadata={"format": "pt"})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo.MODEL / name, directory)
    return layout


def layout_with(layers: list[dict[str, Any]], **config: Any) -> ModelLayout:
    """The layout of the model that `write_model` writes."""
    return layout_of(_config(layers, **config))


def _config(layers: list[dict[str, Any]], **changes: Any) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "architectures": ["GacLlamaForCausalLM"],
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": len(layers),
        "num_attention_heads": QUERY_HEADS,
        "num_key_value_heads": KV_HEADS,
        "vocab_size": 4096,
        "max_position_embeddings": 1024,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        "gac": {
            "version": 1,
            "softmax_scale": HEAD_DIM**-0.5,
            "head_dim": HEAD_DIM,
            "layers": layers,
        },
        **changes,
    }


def _weights(layout: ModelLayout) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for name, shape in layout.tensors().items():
        if name.endswith("rope_inv_freq"):
            weights[name] = torch.rand(shape, generator=generator) ** 4
        elif name.endswith("norm.weight"):
            weights[name] = torch.ones(shape, dtype=torch.bfloat16)
        else:
            # Large weights spread the logits, so that greedy choices are rarely ties.
            gain = 2.0 if name.startswith("lm_head") else 1.0
            weight = torch.randn(shape, generator=generator) * gain * shape[-1] ** -0.5
            weights[name] = weight.to(torch.bfloat16)
    return weights

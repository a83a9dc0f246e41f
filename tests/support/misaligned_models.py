"""A small compressed model with misaligned dims of every kind, as a directory on disk."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.alignment.random_models import random_weights
from vllm_gac.layout.dims import layout_of

# Keys of the dense size and a pruned head, latent keys, and low-rank linears.
LAYERS: list[dict[str, Any]] = [
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


def write_weights(
    directory: Path, raw: dict[str, Any], seed: int = 0, dtype: torch.dtype = torch.float32
) -> Path:
    """Make a directory of config.json `raw` and random weights; RoPE tables stay fp32."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(raw))
    weights = {
        name: tensor if name.endswith("rope_inv_freq") else tensor.to(dtype)
        for name, tensor in random_weights(layout_of(raw).tensors().items(), seed).items()
    }
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    return directory

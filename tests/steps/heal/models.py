"""A small compressed model with misaligned dims of every kind, a dense teacher, and text."""

import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.alignment.random_models import MISALIGNED, gac_config
from tests.support.dense_models import weights, write, write_text
from vllm_gac.layout.dims import layout_of

# 7 steps of 8 sequences.
FAST: dict[str, Any] = {
    "sequence_length": 32,
    "batch_tokens": 256,
    "tokens": 1792,
    "learning_rate": 5e-3,
}


def flags(options: dict[str, Any]) -> list[Any]:
    """The command line of a request's options."""
    pairs = ((f"--{name.replace('_', '-')}", value) for name, value in options.items())
    return [word for pair in pairs for word in pair]


def compressed_config(**changes: Any) -> dict[str, Any]:
    """config.json of the compressed model."""
    raw = gac_config(MISALIGNED, 18) | {"vocab_size": 128} | changes
    return raw | {"head_dim": layout_of(raw).cache_head_dim}


def dense_config(**changes: Any) -> dict[str, Any]:
    """config.json of the teacher."""
    raw = gac_config(MISALIGNED, 18) | {"vocab_size": 128, "architectures": ["LlamaForCausalLM"]}
    del raw["gac"]
    return raw | changes


def write_model(
    directory: Path, raw: dict[str, Any], seed: int = 0, dtype: torch.dtype = torch.float32
) -> Path:
    """A model with random weights and a tokenizer, in place of what `directory` held."""
    shutil.rmtree(directory, ignore_errors=True)
    return write(directory, raw, tensors=weights(raw, dtype, seed, gain=1))


def write_near(directory: Path, teacher: Path) -> Path:
    """The teacher without a fifth of its MLP channels, and with the nearest low rank of q_proj."""
    width, rank = 77, 24
    layer = {
        "key": {"form": "rotary", "heads": 2, "size": 18},
        "value": {"heads": 2, "size": 18},
        "intermediate_size": width,
        "ranks": {"self_attn.q_proj": rank},
    }
    write_model(directory, gac_config([layer] * 2, 18) | {"vocab_size": 128})
    weights = load_file(teacher / "model.safetensors")
    for index in range(2):
        prefix = f"model.layers.{index}."
        for name in ("gate", "up"):
            weights[f"{prefix}mlp.{name}_proj.weight"] = weights[f"{prefix}mlp.{name}_proj.weight"][
                :width
            ].contiguous()
        down = f"{prefix}mlp.down_proj.weight"
        weights[down] = weights[down][:, :width].contiguous()
        u, s, vh = torch.linalg.svd(weights.pop(f"{prefix}self_attn.q_proj.weight"))
        weights[f"{prefix}self_attn.q_proj.A.weight"] = vh[:rank].contiguous()
        weights[f"{prefix}self_attn.q_proj.B.weight"] = (u[:, :rank] * s[:rank]).contiguous()
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    return directory


def write_all(directory: Path) -> tuple[Path, Path, Path]:
    """Directories of the compressed model and of its teacher, and a file of text.

    The weights of both are random, so that they are far from each other.
    """
    student = write_model(directory / "student", compressed_config())
    teacher = write_model(directory / "teacher", dense_config(), seed=1)
    return student, teacher, write_text(directory / "text.txt", 3000)

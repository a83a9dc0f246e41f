"""Writes random LoRA adapters for small gac models, in PEFT's format, and the merged models.

A low-rank linear gets an adapter for each of its two factors.
"""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

RANK, ALPHA = 8, 16


def write_adapter(model: Path, out: Path, merged: Path | None = None) -> None:
    """Write an adapter for every linear of `model` to `out`; the merged fp32 model to `merged`."""
    generator = torch.Generator().manual_seed(3)
    factors, weights = {}, load_file(model / "model.safetensors")
    for name, weight in weights.items():
        weights[name] = weight.float()
        if not is_linear(name, weight):
            continue
        a = torch.randn(RANK, weight.shape[1], generator=generator) * weight.shape[1] ** -0.5
        b = torch.randn(weight.shape[0], RANK, generator=generator) * 0.3
        linear = "base_model.model." + name.removesuffix(".weight")
        factors |= {f"{linear}.lora_A.weight": a, f"{linear}.lora_B.weight": b}
        weights[name] += ALPHA / RANK * b @ a
    write_factors(out, factors)
    if merged is not None:
        shutil.copytree(model, merged)
        save_file(weights, merged / "model.safetensors", metadata={"format": "pt"})


def is_linear(name: str, tensor: torch.Tensor) -> bool:
    """Whether this tensor is the weight of a linear or of a factor in a layer."""
    is_norm = name.endswith("norm.weight")  # those of key heads have two dims
    of_experts = ".mlp.gate." in name or ".experts." in name  # which adapters leave alone
    in_layer = name.startswith("model.layers.") and name.endswith(".weight")
    return in_layer and tensor.ndim == 2 and not is_norm and not of_experts


def write_factors(out: Path, factors: dict[str, torch.Tensor]) -> None:
    """Write an adapter with these tensors, as PEFT does."""
    out.mkdir(parents=True)
    save_file(factors, out / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": ALPHA,
        "target_modules": sorted({name.split(".")[-3] for name in factors}),
        "bias": "none",
    }
    (out / "adapter_config.json").write_text(json.dumps(config))

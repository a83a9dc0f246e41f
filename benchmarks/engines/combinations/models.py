"""The models: Llama-3-8B's shape without weights, and variants of the demo model."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.common import llama3_8b
from vllm_gac import demo
from vllm_gac.checkpoint.open import open_checkpoint
from vllm_gac.layout.dims import KeyLayout, ValueLayout
from vllm_gac.planning.planner import prior_plan
from vllm_gac.planning.request import PlanRequest
from vllm_gac.steps.compress_request import CompressRequest

# Keys (form, heads, size) and values (heads, size) of each layer of the demo model. They differ
# from each other, and no kernel takes one of these sizes without padding.
MISALIGNED: Sequence[tuple[tuple[Any, int, int], tuple[int, int]]] = [
    (("rotary", 4, 90), (4, 61)),
    (("latent", 4, 61), (2, 125)),
    (("rotary", 4, 126), (4, 99)),
    (("rotary", 2, 122), (2, 93)),
]
RANK, ALPHA = 16, 32
CALIBRATED = CompressRequest(max_tokens=1 << 15)


def shapes(out: Path, small: bool) -> dict[str, Path]:
    """Write `dense`, `gac` and `misaligned` of Llama-3-8B's shape without weights."""
    dense = dict(llama3_8b.DENSE)
    if small:  # for a CPU, where it only shows that everything runs
        sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 4096}
        dense |= sizes | heads
    llama3_8b.write_models(out, dense)
    return {name: out / name for name in ("dense", "gac", "misaligned")}


def compressed_demo(out: Path, device: str) -> Path:
    """The demo model as `make serve` compresses it."""
    from vllm_gac.steps.compress import compress

    if not out.exists():
        asked = PlanRequest(param_ratio=0.85, kv_ratio=0.75)
        compress(demo.MODEL, out, asked, CALIBRATED, device=device, progress=False)
    return out


def misaligned_demo(out: Path, device: str) -> Path:
    """The demo model compressed to MISALIGNED attention and to misaligned widths."""
    from vllm_gac.steps.compress import compress

    if not out.exists():
        out.parent.mkdir(parents=True, exist_ok=True)
        plan = out.with_suffix(".json")
        plan.write_text(json.dumps(_plan()))
        compress(demo.MODEL, out, plan, CALIBRATED, device=device, progress=False)
    return out


def _plan() -> dict[str, Any]:
    model = open_checkpoint(demo.MODEL)
    base = prior_plan(model, PlanRequest(param_ratio=0.9, methods=("prune",)))
    layers = [
        replace(
            dense,
            key=KeyLayout(form, heads, size, rope_table=form == "rotary"),
            value=ValueLayout(*value),
            intermediate_size=section.intermediate_size - 3,
        )
        for dense, section, ((form, heads, size), value) in zip(
            model.layout.layers, base.layers, MISALIGNED, strict=True
        )
    ]
    layout = replace(model.layout, layers=tuple(layers))
    plan = base.model_dump(mode="json") | {
        "align": "none",
        "methods": ["heads", "prune"],
        "layers": [layer.section() for layer in layers],
    }
    plan["parameters"]["used"] = layout.parameters
    plan["kv_elements"]["used"] = layout.kv_elements
    return plan


def adapter_and_merged(model: Path, out: Path) -> tuple[Path, Path]:
    """Write a random LoRA adapter of every linear of `model` in PEFT's format; merge it, too."""
    import torch
    from safetensors.torch import load_file, save_file

    generator = torch.Generator().manual_seed(0)
    shutil.rmtree(out, ignore_errors=True)
    adapter, merged = out / "adapter", out / "merged"
    adapter.mkdir(parents=True)
    shutil.copytree(model, merged)
    factors: dict[str, torch.Tensor] = {}
    for shard in sorted(merged.glob("*.safetensors")):
        tensors = load_file(shard)
        for name, weight in tensors.items():
            if not name.startswith("model.layers.") or not name.endswith("_proj.weight"):
                continue
            if weight.ndim != 2:  # up factors of latent keys are not linears
                continue
            a = torch.randn(RANK, weight.shape[1], generator=generator) * weight.shape[1] ** -0.5
            b = torch.randn(weight.shape[0], RANK, generator=generator) * 0.002
            linear = "base_model.model." + name.removesuffix(".weight")
            factors |= {f"{linear}.lora_A.weight": a, f"{linear}.lora_B.weight": b}
            tensors[name] = (weight.float() + ALPHA / RANK * b @ a).to(weight.dtype)
        save_file(tensors, shard, metadata={"format": "pt"})
    save_file(factors, adapter / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none"}
    targets = sorted({name.split(".")[-3] for name in factors})
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"target_modules": targets}))
    return adapter, merged

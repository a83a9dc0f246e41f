"""Writes small gac models in compressed-tensors' format: int8 with a scale for every row."""

import json
import re
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.serving.adapters import is_linear

INT8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "channel",
                "dynamic": False,
            },
            "input_activations": {
                "num_bits": 8,
                "type": "int",
                "symmetric": True,
                "strategy": "token",
                "dynamic": True,
            },
        }
    },
}


def write_int8(
    model: Path, out: Path, rounded: Path, left_alone: str = "lm_head", ignore: str | None = None
) -> None:
    """Quantize the linears of `model` to int8.

    Args:
        model: A model directory.
        out: Gets the quantized model.
        rounded: Gets the same model in the dtype of `model`, with the rounded weights.
        left_alone: Regex of linears that are not quantized.
        ignore: Regex of linears that the config lists as not quantized; default is `left_alone`.
    """
    integers, values = {}, {}
    stored = [load_file(shard) for shard in sorted(model.glob("*.safetensors"))]
    for name, tensor in (item for tensors in stored for item in tensors.items()):
        integers[name] = values[name] = tensor
        if not is_linear(name, tensor) or re.match(left_alone, name.removesuffix(".weight")):
            continue
        scale = tensor.float().abs().amax(1, keepdim=True) / 127
        integers[name] = (tensor.float() / scale).round().to(torch.int8)
        integers[f"{name}_scale"] = scale.to(tensor.dtype)
        values[name] = (integers[name].float() * scale).to(tensor.dtype)
    for directory, tensors in ((out, integers), (rounded, values)):
        shutil.copytree(model, directory, ignore=shutil.ignore_patterns("*.safetensors*"))
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((out / "config.json").read_text())
    ignored = {"ignore": ["lm_head", f"re:{left_alone if ignore is None else ignore}"]}
    (out / "config.json").write_text(json.dumps(config | {"quantization_config": INT8 | ignored}))

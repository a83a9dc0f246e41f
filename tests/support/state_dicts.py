"""Dense models in state dicts, as transformers wrote them before safetensors."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tests.support.dense_models import weights, write

INDEX = "pytorch_model.bin.index.json"
FORMS: dict[str, dict[str, Any]] = {
    "one file": {},
    "shards": {"shards": 3},
    "shards without an index": {"shards": 2, "index": False},
}


def write_bin(
    directory: Path,
    raw: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor] | None = None,
    *,
    shards: int = 1,
    index: bool = True,
) -> Path:
    """Write the model of `dense_models.write` in bf16 as pytorch_model*.bin."""
    write(directory, raw, torch.bfloat16)
    (directory / "model.safetensors").unlink()
    tensors = dict(tensors or weights(raw, torch.bfloat16))
    if shards == 1:
        torch.save(tensors, directory / "pytorch_model.bin")
        return directory
    weight_map = {}
    for number in range(shards):
        file = f"pytorch_model-{number + 1:05}-of-{shards:05}.bin"
        names = list(tensors)[number::shards]
        torch.save({name: tensors[name] for name in names}, directory / file)
        weight_map |= dict.fromkeys(names, file)
    if index:
        (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory

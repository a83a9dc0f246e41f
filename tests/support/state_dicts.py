"""Dense models in state dicts, as transformers wrote them before safetensors."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tests.support.dense_models import weights, write


def write_bin(
    directory: Path,
    raw: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor] | None = None,
    *,
    shards: int = 1,
) -> Path:
    """Write the model of `dense_models.write` in bf16 as pytorch_model*.bin."""
    write(directory, raw, torch.bfloat16)
    (directory / "model.safetensors").unlink()
    tensors = dict(tensors or weights(raw, torch.bfloat16))
    for number in range(shards):
        part = {name: tensors[name] for name in list(tensors)[number::shards]}
        file = f"pytorch_model-{number + 1}.bin" if shards > 1 else "pytorch_model.bin"
        torch.save(part, directory / file)
    return directory

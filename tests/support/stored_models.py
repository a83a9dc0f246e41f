"""What is stored in model directories: read, changed, and computed by the reference model."""

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from vllm_gac.checkpoint.open import Checkpoint, open_checkpoint
from vllm_gac.compression.reference_model import logits, reference

Tensors = dict[str, torch.Tensor]


def stored_tensors(model: Path) -> Tensors:
    """The tensors of all safetensors files of a directory."""
    shards = [load_file(shard) for shard in sorted(model.glob("*.safetensors"))]
    return {name: tensor for shard in shards for name, tensor in shard.items()}


def change_tensors(file: Path, change: Callable[[Tensors], object]) -> None:
    """Write a safetensors file again with changed tensors."""
    tensors = load_file(file)
    change(tensors)
    made = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(made, file, {"format": "pt"})


def logits_of(
    model: Path | Checkpoint, tokens: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """The logits [count, length, vocabulary] of a model for `tokens`, by the reference model."""
    checkpoint = open_checkpoint(model) if isinstance(model, Path) else model
    with checkpoint.reader() as read, torch.inference_mode():
        return logits(reference(checkpoint, dtype), read, tokens)

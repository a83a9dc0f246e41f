"""Tensors that a long run keeps on disk for itself, and reads again if it was stopped."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_gac.checkpoint.headers import open_safetensors
from vllm_gac.errors import CheckpointError

if TYPE_CHECKING:
    import torch


def kept_tensors(path: Path, shapes: Mapping[str, Sequence[int]]) -> "dict[str, torch.Tensor]":
    """Read the file that a stopped run has kept.

    Args:
        path: The file, in the run's workspace.
        shapes: The shape of each tensor that must be there, by its name.

    Raises:
        CheckpointError: The file is missing, broken, or has other tensors.
    """
    with open_safetensors(path, "what the stopped run kept; remove it and resume", "pt") as file:
        stored = {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        expected = {name: list(shape) for name, shape in shapes.items()}
        if stored != expected:
            raise CheckpointError(
                f"{path}: not what the stopped run kept: has {stored}, expected {expected}; remove "
                "it and resume"
            )
        return {name: file.get_tensor(name) for name in shapes}

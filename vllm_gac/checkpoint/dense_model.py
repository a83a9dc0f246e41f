"""Opening a dense model to compress it."""

from pathlib import Path

from vllm_gac.checkpoint.open import Checkpoint, faults, open_checkpoint
from vllm_gac.checkpoint.unsupported import quantized
from vllm_gac.errors import CheckpointError


def open_dense(model: Path) -> Checkpoint:
    """Open a dense model directory. Raises CheckpointError if it cannot be compressed."""
    checkpoint = open_checkpoint(model)
    if packed := quantized(checkpoint.raw_config, model):
        raise CheckpointError(packed)
    if checkpoint.config.gac is not None:
        raise CheckpointError(f"{model}: is compressed already; start from the dense model")
    for fault in faults(checkpoint):
        raise CheckpointError(fault)
    return checkpoint

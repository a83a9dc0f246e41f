"""Describe a model directory from its config and tensor headers, without reading weights."""

from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from vllm_gac.alignment.rules import aligned_dims
from vllm_gac.checkpoint.hub import model_directory
from vllm_gac.checkpoint.open import Checkpoint, faults
from vllm_gac.errors import CheckpointError
from vllm_gac.importers.open_any import Format, open_any_format
from vllm_gac.steps.measurement import Measurement

# vLLM's cache is 16-bit unless --kv-cache-dtype says otherwise, also for F32 checkpoints.
KV_CACHE_BYTES = 2
_SECTION_KEYS = ("key", "value", "intermediate_size", "ranks")


@dataclass(frozen=True, slots=True)
class Inspection:
    """What `vllm-gac inspect --json` prints.

    Attributes:
        format: The format of the directory, e.g. "gac" or "dense".
        layers: The dims of each layer.
        parameters: Number of weights.
        kv_bytes_per_token: Bytes of the KV cache of all layers, with 2 bytes per number.
        dims: Number of dims that compression may choose: head sizes, widths and ranks.
        aligned_dims: How many of these dims are multiples of 8.
        aligned_fraction: Their share.
        measured: What was measured of it when it was compressed; None if nothing was, or if it was
            healed since.
    """

    format: Format
    layers: list[dict[str, Any]]
    parameters: int
    kv_bytes_per_token: int
    dims: int
    aligned_dims: int
    aligned_fraction: float
    measured: Measurement | None = None

    def as_json(self) -> dict[str, Any]:
        """The description as JSON values."""
        return asdict(self) | {"measured": self.measured and self.measured.model_dump(mode="json")}


def inspect(directory: str | Path, *, revision: str | None = None) -> Inspection:
    """Describe a model directory from its config and tensor headers, without reading weights.

    Args:
        directory: A model directory in any format that can be served, or its id on the Hub.
        revision: A branch, tag or commit of a model on the Hub. None: main.

    Returns:
        Its format, the dims of every layer, its parameters, and the bytes that its KV cache needs
        per token.

    Raises:
        CheckpointError: The directory cannot be read, or its tensors do not fit its layout.

    Examples:
        >>> import vllm_gac
        >>> found = vllm_gac.inspect("llama")
        >>> found.format, found.parameters, found.kv_bytes_per_token
        ('dense', 57744, 256)
        >>> found.layers[0]["key"]
        {'form': 'rotary', 'heads': 2, 'size': 16}
    """
    model_format, checkpoint = open_any_format(model_directory(directory, revision))
    for fault in islice(faults(checkpoint), 1):
        raise CheckpointError(
            f"{fault}; see 'vllm-gac inspect --verify {directory}' for every fault"
        )
    return _inspection(model_format, checkpoint)


def _inspection(model_format: Format, checkpoint: Checkpoint) -> Inspection:
    layout, gac = checkpoint.layout, checkpoint.config.gac
    aligned, dims = aligned_dims(layout)
    sections = [layer.section() for layer in layout.layers]
    return Inspection(
        format=model_format,
        layers=[{key: section[key] for key in _SECTION_KEYS} for section in sections],
        parameters=layout.parameters,
        kv_bytes_per_token=layout.kv_elements * KV_CACHE_BYTES,
        dims=dims,
        aligned_dims=aligned,
        aligned_fraction=aligned / dims,
        measured=None if gac is None else Measurement.of(gac.source),
    )

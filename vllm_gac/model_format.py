"""Which of the formats that we serve a directory is in."""

from dataclasses import replace
from pathlib import Path
from typing import Literal, TypeAlias

from vllm_gac.checkpoint import Checkpoint, open_checkpoint
from vllm_gac.infer_layout import infer_layout

Format: TypeAlias = Literal["gac", "dense", "hf-pruned"]


def open_any_format(directory: Path) -> tuple[Format, Checkpoint]:
    """The format of `directory`, and its checkpoint with the layout to serve it by.

    gac: compressed by this project. dense: as its config says. hf-pruned: a Llama or Mistral
    whose tensors have other shapes, from which its layout is read. Only headers are read.
    Raises CheckpointError as `open_checkpoint` does, or if the shapes make no sense.
    """
    checkpoint = open_checkpoint(directory)
    if checkpoint.config.gac is not None:
        return "gac", checkpoint
    expected, found = checkpoint.layout.tensors(), checkpoint.tensors
    if all(found[name].shape == shape for name, shape in expected.items() if name in found):
        return "dense", checkpoint
    layout = infer_layout(checkpoint)
    if layout == checkpoint.layout:  # what differs says nothing about dims: it is a fault
        return "dense", checkpoint
    return "hf-pruned", replace(checkpoint, layout=layout)

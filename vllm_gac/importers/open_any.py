"""Opening a model directory in any format that can be served."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from vllm_gac.checkpoint.headers import TensorInfo, read_headers
from vllm_gac.checkpoint.locate import locate_config, locate_weights
from vllm_gac.checkpoint.open import Checkpoint, checkpoint_of, quantized
from vllm_gac.checkpoint.strict_json import read_json
from vllm_gac.errors import CheckpointError
from vllm_gac.importers import palu, recognize
from vllm_gac.importers.imported import Format as Format
from vllm_gac.importers.imported import Source, dense_of, imported
from vllm_gac.importers.pruned_shapes import infer_layout
from vllm_gac.layout.dims import LayerLayout, ModelLayout

Fits = Callable[[ModelLayout, LayerLayout], bool]


def open_any_format(directory: Path, fits: Fits | None = None) -> tuple[Format, Checkpoint]:
    """The format of `directory`, and its checkpoint with the layout to serve it with.

    `fits` says which forms of a layer the kernels can run, where palu leaves a choice; None: any.

    The formats: gac was compressed by this project. dense has the shapes that its config says.
    hf-pruned is a model whose tensors have other shapes, which give its layout. The other formats
    are named after the tool that wrote them. Only headers are read. Raises
    CheckpointError as `open_checkpoint` does, or if no layout has these shapes.
    """
    directory = Path(directory)
    config, weights = locate_config(directory), locate_weights(directory)
    return recognized(directory, read_json(config), read_headers(weights), fits)


def recognized(
    directory: Path,
    raw: Mapping[str, Any],
    tensors: Mapping[str, TensorInfo],
    fits: Fits | None = None,
) -> tuple[Format, Checkpoint]:
    """The same of a config.json and of the headers of weights in `directory`."""
    if importer := recognize(raw, tensors):
        if importer is palu.read:
            importer = partial(palu.read, fits=fits)
        written = importer(directory, raw, tensors)
        return written.format, written
    checkpoint = checkpoint_of(directory, raw, tensors)
    if checkpoint.config.gac is not None:
        return "gac", checkpoint
    if packed := quantized(raw, directory):
        raise CheckpointError(packed)
    expected, found = checkpoint.layout.tensors(), checkpoint.tensors
    if checkpoint.layout.experts:  # `faults` reports shapes that differ
        return "dense", checkpoint
    if all(found[name].shape == shape for name, shape in expected.items() if name in found):
        return "dense", checkpoint
    layout = infer_layout(checkpoint)
    if (
        layout == checkpoint.layout
    ):  # the shapes that differ are not dims of a layout: `faults` reports them
        return "dense", checkpoint
    base, _ = dense_of(raw, str(directory / "config.json"))
    pruned = imported(
        "hf-pruned",
        directory,
        base,
        layout,
        sources={name: Source((name,)) for name in layout.tensors()},
        expected=layout.tensors(),
        tensors=found,
        unused=frozenset({"lm_head.weight"} if layout.tie_word_embeddings else ()),
    )
    return "hf-pruned", pruned

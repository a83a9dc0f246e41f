"""Opening a model directory in any format that can be served."""

from pathlib import Path

from vllm_gac.checkpoint.open import Checkpoint, open_checkpoint, read_config, tensor_headers
from vllm_gac.checkpoint.unsupported import quantized
from vllm_gac.errors import CheckpointError
from vllm_gac.importers import recognize
from vllm_gac.importers.imported import Format as Format
from vllm_gac.importers.imported import Source, dense_of, imported
from vllm_gac.importers.pruned_shapes import infer_layout


def open_any_format(directory: Path) -> tuple[Format, Checkpoint]:
    """The format of `directory`, and its checkpoint with the layout to serve it with.

    The formats: gac was compressed by this project. dense has the shapes that its config says.
    hf-pruned is a model whose tensors have other shapes, which give its layout. The other formats
    are named after the tool that wrote them. Only headers are read. Raises
    CheckpointError as `open_checkpoint` does, or if no layout has these shapes.
    """
    directory = Path(directory)
    raw = read_config(directory)
    if importer := recognize(raw):
        written = importer(directory, raw, tensor_headers(directory))
        return written.format, written
    checkpoint = open_checkpoint(directory)
    if checkpoint.config.gac is None and (packed := quantized(raw, directory)):
        raise CheckpointError(packed)
    if importer := recognize(raw, checkpoint.tensors):
        written = importer(directory, raw, checkpoint.tensors)
        return written.format, written
    if checkpoint.config.gac is not None:
        return "gac", checkpoint
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

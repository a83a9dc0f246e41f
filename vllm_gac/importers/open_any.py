"""Opening a model directory in any format that can be served, or one file of another tool."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_gac.checkpoint.headers import TensorInfo, read_headers
from vllm_gac.checkpoint.locate import (
    Weights,
    locate_config,
    locate_weights,
    not_a_directory,
    state_dict_files,
)
from vllm_gac.checkpoint.open import Checkpoint, checkpoint_of
from vllm_gac.checkpoint.untrusted_files import read_json
from vllm_gac.errors import CheckpointError
from vllm_gac.importers import recognize
from vllm_gac.importers.imported import Format as Format
from vllm_gac.importers.imported import Source, dense_of, imported
from vllm_gac.importers.pruned_shapes import infer_layout


def open_any_format(directory: Path) -> tuple[Format, Checkpoint]:
    """The format of `directory`, and its checkpoint with the layout to serve it with.

    The formats: gac was compressed by this project. dense has the shapes that its config says.
    hf-pruned is a model whose tensors have other shapes, which give its layout. The other formats
    are named after the tool that wrote them. Only headers are read. Raises CheckpointError as
    `open_checkpoint` does, or if no layout has these shapes.
    """
    directory = Path(directory)
    config, weights = locate_config(directory), locate_weights(directory)
    return _recognized(directory, read_json(config), read_headers(weights))


def open_source(source: Path, base: Path | None) -> Checkpoint:
    """The model in `source`. One in the files of another tool is an `Imported`.

    Args:
        source: A model directory, or a file with a state dict.
        base: Directory of the model before compression. The config.json of a file is taken from
            there; None: from beside it.

    Raises:
        CheckpointError: There is no such model, or its headers are broken.
    """
    if base is not None and not base.is_dir():
        raise CheckpointError(f"{base}: {not_a_directory(base)}")
    if source.suffix == ".safetensors":
        raise CheckpointError(f"{source}: one file of a model; give the directory that it is in")
    one_file = source.is_file() and source.suffix != ".gguf"
    if one_file and source.name not in state_dict_files(source.parent):
        raw = read_json(locate_config(_with_config(source, base)))
        headers = read_headers(Weights(source.parent, (source.name,)))
        return _recognized(source.parent, raw, headers)[1]
    return open_any_format(source.parent if one_file else source)[1]


def _with_config(file: Path, base: Path | None) -> Path:
    """The directory with the config.json of the model in `file`."""
    if base is None and not (file.parent / "config.json").exists():
        raise CheckpointError(
            f"{file}: there is no config.json beside it; give the directory of the model before "
            "compression with --base"
        )
    return base or file.parent


def _recognized(
    directory: Path,
    raw: Mapping[str, Any],
    tensors: Mapping[str, TensorInfo],
) -> tuple[Format, Checkpoint]:
    """The same of a config.json and of the headers of weights in `directory`."""
    if importer := recognize(raw, tensors):
        written = importer(directory, raw, tensors)
        return written.format, written
    checkpoint = checkpoint_of(directory, raw, tensors)
    if checkpoint.config.gac is not None:
        return "gac", checkpoint
    quantized = checkpoint.quantization is not None
    expected, stored = checkpoint.layout.tensors(), checkpoint.tensors
    if checkpoint.layout.experts or quantized:  # `faults` reports shapes that differ
        return "dense", checkpoint
    if all(stored[name].shape == shape for name, shape in expected.items() if name in stored):
        return "dense", checkpoint
    layout = infer_layout(checkpoint)
    if layout == checkpoint.layout:  # what differs is no dim of a layout: `faults` reports it
        return "dense", checkpoint
    base, _ = dense_of(checkpoint.raw_config, str(directory / "config.json"))
    pruned = imported(
        "hf-pruned",
        directory,
        base,
        layout,
        sources={name: Source((name,)) for name in layout.tensors()},
        expected=layout.tensors(),
        tensors=stored,
        unused=frozenset({"lm_head.weight"} if layout.tie_word_embeddings else ()),
    )
    return "hf-pruned", pruned

"""Opening a model directory in any format that can be served, or one file of another tool."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
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
from vllm_gac.layout.dims import KeyLayout, LayerLayout, ModelLayout, ValueLayout

logger = logging.getLogger(__name__)


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
    directory: Path, raw: Mapping[str, Any], tensors: Mapping[str, TensorInfo]
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
    )
    return "hf-pruned", pruned


def infer_layout(checkpoint: Checkpoint) -> ModelLayout:
    """Infer the layout of a pruned model, one without a `"gac"` object, from its tensors' shapes.

    Tools that prune heads and MLP channels leave shapes that differ from the config, often in a
    different way in every layer. They are enough if head sizes did not change, or only values
    became smaller. Smaller rotary keys would need RoPE frequencies that the files do not hold.

    The number of layers, the head size and the biases are as the config says. Raises
    CheckpointError naming a tensor that is missing or fits no layout. Tensors that are not needed
    for this are checked by `faults`.
    """
    embedding = "model.embed_tokens.weight"
    vocab_size, hidden_size = _shape(checkpoint, embedding)
    heads = checkpoint.layout.layers[0].query_heads
    if checkpoint.raw_config["model_type"] == "llama" and hidden_size % heads:
        why = f"transformers wants a multiple of the config's {heads} attention heads"
        raise _nonsense(checkpoint, embedding, why)
    dense = replace(checkpoint.layout, vocab_size=vocab_size, hidden_size=hidden_size)
    layers = tuple(_layer(checkpoint, dense, index) for index in range(len(dense.layers)))
    _check_head_size(checkpoint, dense, layers)
    return replace(dense, layers=layers)


def _check_head_size(
    checkpoint: Checkpoint, dense: ModelLayout, layers: Sequence[LayerLayout]
) -> None:
    """Raise CheckpointError if `layers` may as well have the config's heads, all of a smaller size.

    A head_dim in config.json settles it, but tools leave an old one there: that is warned of.
    """
    size, whole = dense.head_dim, dense.layers[0]
    q, k = whole.query_heads, whole.key.heads
    dims = {(x.query_heads, x.key.heads, x.value.heads, x.value.size) for x in layers}
    of_qkvo = {(i * size, j * size, m * n, i * n) for i, j, m, n in dims}
    sizes = [s for s in range(2, size, 2) if of_qkvo == {(q * s, k * s, k * s, q * s)}]
    if not sizes or dense.qk_norm:  # whose weight has the size of a head
        return
    where = f"{checkpoint.directory / 'config.json'}: head_dim"
    readings = (
        f"every layer's tensors are those of {layers[0].query_heads} query heads of {size}, or of "
        f"{q} of {sizes[0]}"
    )
    if checkpoint.raw_config.get("head_dim") is None:
        raise CheckpointError(f"{where}: missing, and {readings}; add {size} or {sizes[0]}")
    logger.warning("%s: %d: %s; if of the latter, set it to %d", where, size, readings, sizes[0])


def _layer(checkpoint: Checkpoint, dense: ModelLayout, index: int) -> LayerLayout:
    attention, size = f"model.layers.{index}.self_attn.", dense.head_dim
    q, k, v, o = (f"{attention}{x}_proj.weight" for x in "qkvo")
    query_heads = _divided(checkpoint, q, 0, size)
    key_heads = _divided(checkpoint, k, 0, size)
    value_size = _divided(checkpoint, o, 1, query_heads)
    value_heads = _divided(checkpoint, v, 0, value_size)
    if query_heads % key_heads:
        raise _nonsense(checkpoint, k, f"{query_heads} query heads cannot share {key_heads} evenly")
    if key_heads % value_heads:
        raise _nonsense(checkpoint, v, f"{key_heads} key heads cannot share {value_heads} evenly")
    width, _ = _shape(checkpoint, f"model.layers.{index}.mlp.gate_proj.weight")
    return LayerLayout(
        query_heads=query_heads,
        key=KeyLayout("rotary", key_heads, size),
        value=ValueLayout(value_heads, value_size),
        intermediate_size=width,
        has_rope=dense.layers[index].has_rope,
    )


def _divided(checkpoint: Checkpoint, name: str, axis: int, by: int) -> int:
    """The tensor's dim along `axis` divided by `by`, e.g. the number of heads of size `by`."""
    dim = _shape(checkpoint, name)[axis]
    if dim % by:
        raise _nonsense(checkpoint, name, f"{dim} is not a multiple of {by}")
    return dim // by


def _shape(checkpoint: Checkpoint, name: str) -> tuple[int, int]:
    """The rows and columns of matrix `name`."""
    info = checkpoint.tensors.get(name)
    if info is None:
        raise CheckpointError(f"{checkpoint.directory}: {name}: missing")
    if len(info.shape) != 2 or min(info.shape) < 1:
        raise _nonsense(checkpoint, name, "expected a matrix")
    return info.shape[0], info.shape[1]


def _nonsense(checkpoint: Checkpoint, name: str, why: str) -> CheckpointError:
    info = checkpoint.tensors[name]
    return CheckpointError(
        f"{checkpoint.directory / info.file}: {name}: shape {list(info.shape)} fits no layout of "
        f"heads of {checkpoint.layout.head_dim}: {why}; see head_dim in config.json"
    )

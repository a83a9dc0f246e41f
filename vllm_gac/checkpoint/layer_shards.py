"""The shards of a model directory: one for each layer, and one for the tensors outside the layers.

Each shard is written atomically, and a shard that exists is not written again. A run that was
stopped therefore continues with the first layer that has no shard, and only one layer has to be
in memory at a time. Before a shard appears, checksums of its tensors are in digests.json; by
these a run that goes on knows its own.
"""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from tqdm import tqdm

from vllm_gac.checkpoint.atomic_files import write_tensors
from vllm_gac.checkpoint.digests import sign_tensors
from vllm_gac.checkpoint.headers import read_headers
from vllm_gac.checkpoint.locate import Weights
from vllm_gac.checkpoint.open import Checkpoint
from vllm_gac.checkpoint.tensor_files import ShardFiles
from vllm_gac.errors import CheckpointError
from vllm_gac.layout.dims import ModelLayout

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

# Returns a tensor by its full name, e.g. "model.layers.0.mlp.up_proj.weight".
ReadTensor: TypeAlias = "Callable[[str], torch.Tensor]"
# Threads that read and check a layer for a GPU, which would wait for one of them.
_READERS = 8


def write_layer_shards(
    directory: Path,
    layout: ModelLayout,
    make_layer: "Callable[[int], Mapping[str, torch.Tensor]]",
    read_rest: ReadTensor,
    *,
    stored: "Callable[[str], Sequence[str]]" = lambda name: [name],
    description: str,
    progress: bool = True,
) -> None:
    """Write every shard of a model of `layout` that `directory` does not have yet.

    Args:
        directory: An existing directory.
        layout: The layout of the model that is written.
        make_layer: Returns the tensors of layer `index` by their names within the layer, e.g.
            "mlp.up_proj.weight". It is called only for layers without a shard, in ascending order.
        read_rest: Returns a tensor outside the layers (embeddings, the last norm) by its name.
        stored: The names of the tensors that `read_rest` returns for one of the layout.
        description: What the progress bar says, e.g. "compress".
        progress: Whether to show a progress bar on stderr.

    Raises:
        CheckpointError: A shard that is there is not as this run wrote it.
        DiskError: The disk is full or not writable.
    """
    layers = len(layout.layers)
    logger.info("%s: %d layers", description, layers)
    for index in tqdm(range(layers), desc=description, unit="layer", disable=not progress):
        shard = _shard_name(index, layers)
        if not _is_written(directory, shard):
            prefix = _layer_prefix(index)
            tensors = make_layer(index)
            _write(directory, shard, {prefix + name: tensor for name, tensor in tensors.items()})
    shard = _shard_name(layers, layers)
    if not _is_written(directory, shard):
        rest = [name for name in layout.tensors() if not name.startswith("model.layers.")]
        _write(directory, shard, {part: read_rest(part) for name in rest for part in stored(name)})


def read_layer(
    layout: ModelLayout, read: ReadTensor, index: int, device: str = "cpu"
) -> "dict[str, torch.Tensor]":
    """Read the tensors of layer `index` of `layout`, by their names within the layer.

    Several threads read them if the `device` to compute on is a GPU.
    """
    names = [name for name, _ in layout.layer_tensors(index)]
    if device == "cpu":
        tensors = [*map(read, names)]
    else:
        with ThreadPoolExecutor(_READERS) as readers:
            tensors = [*readers.map(read, names)]
    short = (name.removeprefix(_layer_prefix(index)) for name in names)
    return dict(zip(short, tensors, strict=True))


def read_written_layer(
    source: Checkpoint, directory: Path, layout: ModelLayout, index: int
) -> "dict[str, torch.Tensor]":
    """The tensors of a layer whose shard this run has made of `source`, and written."""
    shard = Weights(directory, (_shard_name(index, len(layout.layers)),))
    written = replace(source, directory=directory, layout=layout, tensors=read_headers(shard))
    with written.reader() as read:
        return read_layer(layout, read, index)


def _shard_name(index: int, layers: int) -> str:
    """The shard of layer `index`; index `layers` is the shard of the tensors outside the layers."""
    return f"model-{index + 1:05}-of-{layers + 1:05}.safetensors"


def _write(directory: Path, shard: str, tensors: "Mapping[str, torch.Tensor]") -> None:
    sign_tensors(directory, tensors)
    write_tensors(directory / shard, tensors)


def _is_written(directory: Path, shard: str) -> bool:
    """Whether this run had written a shard before it was stopped.

    Raises CheckpointError if something else is there, or other bytes than were written.
    """
    if not os.path.lexists(directory / shard):
        return False
    with closing(ShardFiles(directory)) as files:
        headers = read_headers(Weights(directory, (shard,)))
        is_known = all(info.crc32 is not None for info in headers.values())
        faults = [fault for name, info in headers.items() if (fault := files.fault(name, info))]
    if faults or not is_known or (directory / shard).is_symlink():
        raise CheckpointError(
            f"{directory / shard}: is not what the stopped run wrote there, so all that it wrote "
            "is made again: give --resume once more"
        )
    return True


def _layer_prefix(index: int) -> str:
    return f"model.layers.{index}."

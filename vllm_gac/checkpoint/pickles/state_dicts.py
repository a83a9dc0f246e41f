"""The headers of state dicts in pytorch_model*.bin of a model directory.

A tensor has the same bytes in such a file as in a safetensors file, so that everything is the same
once the pickle has been interpreted.
"""

import math
import os
from pathlib import Path

from vllm_gac.checkpoint.headers import (
    MAX_SHARDS,
    MAX_TENSORS,
    TensorInfo,
    check_index,
    read_weight_map,
    refuse_escape,
)
from vllm_gac.checkpoint.pickles.torch_file import TorchFile, open_torch_file
from vllm_gac.checkpoint.pickles.values import StoredTensor
from vllm_gac.checkpoint.strict_json import read_bounded
from vllm_gac.checkpoint.unsupported import lfs_pointer
from vllm_gac.errors import CheckpointError

INDEX_FILE = "pytorch_model.bin.index.json"


def state_dict_files(directory: Path) -> list[Path]:
    """The state dict files of transformers in `directory`, sorted by name."""
    return sorted(directory.glob("pytorch_model*.bin"))


def is_state_dict(file: TorchFile) -> bool:
    """Whether the file holds tensors by name, and not a model of modules."""
    root = file.root
    return type(root) is dict and bool(root) and all(map(_is_entry, root.items()))


def read_state_dict_headers(directory: Path) -> dict[str, TensorInfo]:
    """Every tensor of the state dicts in `directory`, by name.

    Raises CheckpointError if a file is not a state dict, is outside the directory or holds a tensor
    that is not contiguous, if two files hold the same tensor, or if the index does not match.
    """
    index_path = directory / INDEX_FILE
    weight_map = None
    paths = state_dict_files(directory)
    if os.path.lexists(index_path):
        weight_map = read_weight_map(directory, index_path, ".bin")
        paths = [directory / file for file in sorted(set(weight_map.values()))]
    if len(paths) > MAX_SHARDS:
        raise CheckpointError(f"{directory}: more than {MAX_SHARDS} shards, the most that are read")
    tensors: dict[str, TensorInfo] = {}
    for path in paths:
        headers = _headers(directory, path)
        if len(tensors) + len(headers) > MAX_TENSORS:
            raise CheckpointError(
                f"{path}: with the files before it more than {MAX_TENSORS} tensors, the most that "
                "are read"
            )
        for name, info in headers.items():
            if name in tensors:
                raise CheckpointError(f"{path}: {name} is also in {tensors[name].file}")
            tensors[name] = info
    if weight_map is not None:
        check_index(index_path, weight_map, tensors)
    return tensors


def _headers(directory: Path, path: Path) -> dict[str, TensorInfo]:
    refuse_escape(directory, path)
    if fault := lfs_pointer(read_bounded(path, CheckpointError, 64)):
        raise CheckpointError(f"{path}: {fault}")
    file = open_torch_file(path)
    if not is_state_dict(file):
        raise CheckpointError(
            f"{path}: not a state dict, tensors by name; 'vllm-gac import' converts whole models"
        )
    headers = {}
    for name, tensor in file.root.items():
        if not _is_whole(tensor):
            raise CheckpointError(
                f"{path}: {name}: of shape {list(tensor.shape)} with strides "
                f"{list(tensor.stride)}, not in one piece; save the model with save_pretrained"
            )
        headers[name] = file.info(tensor)
    # Two names may share one storage, as tied embeddings do. With hundreds of names, a small file
    # could become a huge model.
    total = sum(file.bytes_of(tensor) for tensor in file.root.values())
    if total > 2 * path.stat().st_size:
        raise CheckpointError(f"{path}: tensors of {total} bytes, more than twice the file's size")
    return headers


def _is_entry(item: tuple[object, object]) -> bool:
    return type(item[0]) is str and type(item[1]) is StoredTensor


def _is_whole(tensor: StoredTensor) -> bool:
    """Whether a tensor is contiguous in row-major order."""
    step = math.prod(tensor.shape)
    for size, stride in zip(tensor.shape, tensor.stride, strict=True):
        step //= max(size, 1)
        if size > 1 and stride != step:
            return False
    return True

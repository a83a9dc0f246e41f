"""The headers of the weights of a model directory: every tensor's name, dtype and shape.

The files are those that vLLM's loader would read: the files in the index, or without an index
every `*.safetensors`. A directory without any may have state dicts, pytorch_model*.bin.
"""

import os
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from vllm_gac.checkpoint.dtypes import stored_dtype
from vllm_gac.checkpoint.regular_files import unchanging
from vllm_gac.checkpoint.state_dicts import load_state_dict
from vllm_gac.checkpoint.strict_json import MAX_BYTES, parse_json, read_bounded, read_json
from vllm_gac.checkpoint.unsupported import CONSOLIDATED, lfs_pointer, without_weights
from vllm_gac.errors import CheckpointError
from vllm_gac.errors.shown import shown

INDEX_FILE = "model.safetensors.index.json"
_STATE_DICT_INDEX = "pytorch_model.bin.index.json"
# The largest dense model has 1,137 tensors in some 200 shards. 1024 layers, which is the most that
# is served, have 9,219 tensors; 650 layers have 16,250 if every linear is two with a bias.
MAX_TENSORS = 1 << 14
MAX_SHARDS = 1024


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What the header of a file says about one tensor.

    Attributes:
        file: Name of the file within the model directory.
        dtype: safetensors' name of the dtype, e.g. "BF16".
        shape: The tensor's shape.
        start: Position of its first byte in the file, or in the tensor `key` of a state dict.
        version: Size and time of the file when its header was read, to notice if it has changed
            since. None: not checked.
        key: The tensor's name in a state dict. None: the file is in safetensors.
    """

    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    version: tuple[int, int] | None = field(default=None, compare=False)
    key: str | None = None


def version_of(status: os.stat_result) -> tuple[int, int]:
    """Size and time of the last change of a file."""
    return status.st_size, status.st_mtime_ns


def state_dict_files(directory: Path) -> list[str]:
    """The names of the state dicts in `directory` as transformers names them, sorted."""
    return sorted(path.name for path in directory.glob("pytorch_model*.bin"))


def read_headers(directory: Path) -> dict[str, TensorInfo]:
    """Every tensor of the model in `directory`, by name.

    Raises CheckpointError if there are no weights, if a file is malformed or outside the
    directory, if two files hold the same tensor, or if the index does not match the files.
    """
    index_path, suffix = directory / INDEX_FILE, ".safetensors"
    files = sorted(path.name for path in directory.glob(f"*{suffix}"))
    if not any(directory.glob("*.safetensors*")) and (found := state_dict_files(directory)):
        index_path, suffix, files = directory / _STATE_DICT_INDEX, ".bin", found
    weight_map = None
    if os.path.lexists(index_path):
        weight_map = _weight_map(directory, index_path, suffix)
        files = sorted(set(weight_map.values()))
    else:
        files = [file for file in files if not file.startswith(CONSOLIDATED)]
    if len(files) > MAX_SHARDS:
        raise CheckpointError(f"{directory}: more than {MAX_SHARDS} shards, the most that are read")
    if not set(files) - {"adapter_model.safetensors"}:
        raise CheckpointError(f"{directory}: {without_weights(directory)}")
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        header = read_shard(directory, file)
        if len(tensors) + len(header) > MAX_TENSORS:
            raise CheckpointError(
                f"{directory / file}: with the shards before it more than {MAX_TENSORS} tensors, "
                "the most that are read"
            )
        for name, info in header.items():
            if name in tensors:
                other = tensors[name].file
                raise CheckpointError(f"{directory / file}: {shown(name)} is also in {other}")
            tensors[name] = info
    if weight_map is not None:
        _check_index(index_path, weight_map, tensors)
    return tensors


def read_shard(directory: Path, file: str) -> dict[str, TensorInfo]:
    """The tensors in one file, in safetensors or a state dict. Raises as `read_headers`."""
    path = directory / file
    refuse_escape(directory, path)
    version = _version(path)
    of_file = _safetensors if file.endswith(".safetensors") else _state_dict
    tensors = {name: replace(info, version=version) for name, info in of_file(path)}
    if _version(path) != version:
        raise CheckpointError(f"{path}: has changed while its header was read; try again")
    return tensors


def refuse_escape(directory: Path, path: Path) -> None:
    """Raise CheckpointError if `path` is a link out of `directory`.

    The blobs of a Hugging Face cache count as inside: all files of its snapshots are links to
    blobs, and so are the files that older versions of `hf download --local-dir` wrote.
    """
    target, root = Path(os.path.realpath(path)), Path(os.path.realpath(directory))
    if target.is_relative_to(root):
        return
    if target.parent.name == "blobs" and target.parent.parent.name.startswith("models--"):
        return
    raise CheckpointError(
        f"{path}: links to {target}, outside the model directory; to use what it links to, copy "
        f"the files themselves: cp -rL {shlex.quote(str(directory))} COPY"
    )


def _weight_map(directory: Path, index_path: Path, suffix: str) -> dict[str, str]:
    """Read from an index which file each tensor is in; file names must end in `suffix`.

    Raises CheckpointError if the index is malformed or outside `directory`.
    """
    refuse_escape(directory, index_path)
    weight_map = read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index_path}: weight_map is missing, empty or not an object")
    for name, file in weight_map.items():
        if (
            not isinstance(file, str)
            or not file.endswith(suffix)
            or not file.isprintable()
            or "/" in file
            or "\\" in file
        ):
            raise CheckpointError(
                f"{index_path}: {shown(name)}: {shown(repr(file))} is not the name of a {suffix} "
                "file in the model directory; move the file there, and say so in the index"
            )
    return weight_map


def _check_index(
    index_path: Path, weight_map: Mapping[str, str], tensors: Mapping[str, TensorInfo]
) -> None:
    """Raise CheckpointError unless an index lists exactly the `tensors` of its files."""
    for name, file in weight_map.items():
        if name not in tensors or tensors[name].file != file:
            raise CheckpointError(f"{index_path}: {shown(name)} is not in {shown(file)}")
    for name, info in tensors.items():
        if name not in weight_map:
            raise CheckpointError(
                f"{index_path.parent / info.file}: {shown(name)} is not listed in {index_path.name}"
            )


def _version(path: Path) -> tuple[int, int]:
    try:
        return version_of(path.stat())
    except OSError as e:
        raise CheckpointError(f"{path}: cannot be read ({e.strerror or e})") from e


def _safetensors(path: Path) -> Iterator[tuple[str, TensorInfo]]:
    with unchanging(path) as same, _accepted(path, same, "a readable safetensors file", "np"):
        start = 8 + _header_length(path, same)
        with same.open("rb") as file:
            raw = file.read(start)[8:]
    # safetensors accepts a name twice and keeps the last; our parser refuses it.
    header = parse_json(raw, str(path))
    header.pop("__metadata__", None)
    for name, entry in header.items():
        position = start + entry["data_offsets"][0]
        yield name, TensorInfo(path.name, entry["dtype"], tuple(entry["shape"]), position)


def _state_dict(path: Path) -> Iterator[tuple[str, TensorInfo]]:
    if fault := lfs_pointer(read_bounded(path, CheckpointError, 64)):
        raise CheckpointError(f"{path}: {fault}")
    for name, tensor in load_state_dict(path).items():
        stored = stored_dtype(tensor.dtype)
        dtype = stored.name if stored else str(tensor.dtype)
        yield name, TensorInfo(path.name, dtype, tuple(tensor.shape), 0, key=name)


@contextmanager
def open_safetensors(path: Path, expected: str, framework: str = "np") -> Iterator[Any]:
    """Open `path` with the safetensors library, after its header is known to be small enough.

    The library checks dtypes and sizes, and that the tensors cover the data without overlap or
    gap. Raises CheckpointError if the file is not `expected`, e.g. "a statistics file".
    """
    with unchanging(path) as same, _accepted(path, same, expected, framework) as file:
        yield file


@contextmanager
def _accepted(path: Path, same: Path, expected: str, framework: str) -> Iterator[Any]:
    """The file at `path`, which is opened by the name `same`, as the library opens it."""
    try:
        if (length := _header_length(path, same)) > MAX_BYTES:
            raise CheckpointError(
                f"{path}: not {expected} (its header would be {length} bytes, at most {MAX_BYTES} "
                "are read)"
            )
        with safe_open(same, framework=framework) as file:
            yield file
    except (OSError, SafetensorError) as e:
        raise CheckpointError(f"{path}: not {expected} ({e})") from e


def _header_length(path: Path, same: Path) -> int:
    with same.open("rb") as file:
        start = file.read(64)
    if fault := lfs_pointer(start):
        raise CheckpointError(f"{path}: {fault}")
    return int.from_bytes(start[:8], "little")

"""The headers of the safetensors files of a model directory.

The files are those that vLLM's loader would read: the files in the index, or without an index
every `*.safetensors`.
"""

import os
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from vllm_gac.checkpoint.regular_files import unchanging
from vllm_gac.checkpoint.strict_json import MAX_BYTES, parse_json, read_json
from vllm_gac.checkpoint.unsupported import CONSOLIDATED, lfs_pointer, without_weights
from vllm_gac.errors import CheckpointError
from vllm_gac.errors.shown import shown

INDEX_FILE = "model.safetensors.index.json"
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
        start: Position of its first byte in the file.
        version: Size and time of the file when its header was read, to notice if it has changed
            since. None: not checked.
    """

    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    version: tuple[int, int] | None = field(default=None, compare=False)


def version_of(status: os.stat_result) -> tuple[int, int]:
    """Size and time of the last change of a file."""
    return status.st_size, status.st_mtime_ns


def read_headers(directory: Path) -> dict[str, TensorInfo]:
    """Every tensor of the model in `directory`, by name.

    Raises CheckpointError if there is no safetensors file, if a file is malformed or outside the
    directory, if two files hold the same tensor, or if the index does not match the files.
    """
    index_path = directory / INDEX_FILE
    weight_map = None
    if os.path.lexists(index_path):
        weight_map = read_weight_map(directory, index_path, ".safetensors")
        files = sorted(set(weight_map.values()))
    else:
        found = islice(directory.glob("*.safetensors"), MAX_SHARDS + 1)
        files = sorted(path.name for path in found if not path.name.startswith(CONSOLIDATED))
    if len(files) > MAX_SHARDS:
        raise CheckpointError(f"{directory}: more than {MAX_SHARDS} shards, the most that are read")
    if not set(files) - {"adapter_model.safetensors"}:
        raise CheckpointError(f"{directory}: {without_weights(directory)}")
    tensors: dict[str, TensorInfo] = {}
    for file in files:
        header = _shard_header(directory, file)
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
        check_index(index_path, weight_map, tensors)
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


def read_weight_map(directory: Path, index_path: Path, suffix: str) -> dict[str, str]:
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


def check_index(
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


def _shard_header(directory: Path, file: str) -> dict[str, TensorInfo]:
    """The tensors in the header of a shard."""
    path = directory / file
    refuse_escape(directory, path)
    before = _version(path)
    header, start = _parsed_header(path)
    if _version(path) != before:
        raise CheckpointError(f"{path}: has changed while its header was read; try again")
    header.pop("__metadata__", None)
    return {
        name: TensorInfo(
            file, entry["dtype"], tuple(entry["shape"]), start + entry["data_offsets"][0], before
        )
        for name, entry in header.items()
    }


def _version(path: Path) -> tuple[int, int]:
    try:
        return version_of(path.stat())
    except OSError as e:
        raise CheckpointError(f"{path}: cannot be read ({e.strerror or e})") from e


def _parsed_header(path: Path) -> tuple[dict[str, Any], int]:
    """The header of a file that safetensors accepts, and the position where its data begins."""
    with unchanging(path) as same, _accepted(path, same, "a readable safetensors file", "np"):
        start = 8 + _header_length(path, same)
        with same.open("rb") as file:
            raw = file.read(start)[8:]
    # safetensors accepts a name twice and keeps the last; our parser refuses it.
    return parse_json(raw, str(path)), start


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

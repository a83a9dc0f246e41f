"""The headers of weights, read second of the three steps of opening: names, dtypes and shapes."""

import os
import re
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from vllm_gac.checkpoint.digests import Digests
from vllm_gac.checkpoint.dtypes import stored_dtype
from vllm_gac.checkpoint.locate import Weights
from vllm_gac.checkpoint.untrusted_files import MAX_BYTES, open_pinned, open_untrusted, parse_json
from vllm_gac.errors import CheckpointError
from vllm_gac.errors.sanitize import sanitize

if TYPE_CHECKING:
    import torch

# The largest dense model has 1,137 tensors in some 200 shards; Qwen3-30B-A3B has 18,867 and
# Qwen3-235B-A22B 36,945, three for each expert.
MAX_TENSORS = 1 << 16
# It says how to make safetensors of a pickle that is refused.
PAGE = "docs/guide.md#models-in-a-pickle"
_REFUSED_NAME = re.compile(r"GLOBAL ([\w.]+)")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What the header of a file says about one tensor.

    Attributes:
        file: Name of the file within the model directory.
        dtype: safetensors' name of the dtype, e.g. "BF16".
        shape: The tensor's shape.
        start: Position of its first byte in the file, or in a tensor of a state dict.
        version: Size and time of the file when its header was read, to notice if it has changed
            since. None: not checked.
        mapped: The tensor of a state dict. None: the file is in safetensors.
        crc32: The checksum of its bytes as they were written. None: it is unknown.
    """

    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    version: tuple[int, int] | None = field(default=None, compare=False)
    mapped: "torch.Tensor | None" = field(default=None, compare=False)
    crc32: int | None = field(default=None, compare=False)


def version_of(status: os.stat_result) -> tuple[int, int]:
    """Size and time of the last change of a file."""
    return status.st_size, status.st_mtime_ns


def read_headers(weights: Weights) -> dict[str, TensorInfo]:
    """Every tensor of a model, by name.

    Raises CheckpointError if a file is malformed, if two hold the same tensor, or if the index does
    not list exactly the tensors of its files.
    """
    tensors: dict[str, TensorInfo] = {}
    for file in weights.files:
        path = weights.directory / file
        header = _header(path)
        if len(tensors) + len(header) > MAX_TENSORS:
            raise CheckpointError(
                f"{path}: with the shards before it more than {MAX_TENSORS} tensors, the most that "
                "are read"
            )
        for name in header:
            if name in tensors:
                raise CheckpointError(f"{path}: {sanitize(name)} is also in {tensors[name].file}")
            if weights.index is not None and name not in weights.listed:
                raise CheckpointError(
                    f"{path}: {sanitize(name)} is not listed in {weights.index.name}"
                )
        tensors |= header
    for name, file in weights.listed.items():
        if name not in tensors or tensors[name].file != file:
            raise CheckpointError(f"{weights.index}: {sanitize(name)} is not in {sanitize(file)}")
    checksums = Digests.of(weights.directory).tensors
    return {
        name: replace(info, crc32=checksums.get(name)) if checksums else info
        for name, info in tensors.items()
    }


def _header(path: Path) -> dict[str, TensorInfo]:
    """The tensors in one file, in safetensors or a state dict."""
    version = _version(path)
    read = _safetensors if path.suffix == ".safetensors" else _state_dict
    tensors = read(path, version)
    if _version(path) != version:
        raise CheckpointError(f"{path}: has changed while its header was read; try again")
    return tensors


def _version(path: Path) -> tuple[int, int]:
    try:
        return version_of(path.stat())
    except OSError as e:
        raise CheckpointError(f"{path}: cannot be read ({e.strerror or e})") from e


def _safetensors(path: Path, version: tuple[int, int]) -> dict[str, TensorInfo]:
    with _accepted(path, "a readable safetensors file", "np") as (raw, _):
        # safetensors accepts a name twice and keeps the last; our parser refuses it.
        header = parse_json(raw, str(path))
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        start, shape = 8 + len(raw) + entry["data_offsets"][0], tuple(entry["shape"])
        tensors[name] = TensorInfo(path.name, entry["dtype"], shape, start, version)
    return tensors


def _state_dict(path: Path, version: tuple[int, int]) -> dict[str, TensorInfo]:
    tensors = {}
    for name, tensor in _load_state_dict(path).items():
        stored = stored_dtype(tensor.dtype)
        dtype = stored.name if stored else str(tensor.dtype)
        tensors[name] = TensorInfo(path.name, dtype, tuple(tensor.shape), 0, version, tensor)
    return tensors


def _load_state_dict(path: Path) -> "dict[str, torch.Tensor]":
    """The tensors of the state dict in `path` by name, contiguous and mapped.

    torch.load runs no code with `weights_only=True`, and is never called without it. It maps the
    zip format, which torch.save writes since 1.6. Raises CheckpointError naming the file if torch
    refuses it or it is damaged, and the tensor if one is not contiguous.
    """
    import torch

    with open_pinned(path) as same:
        try:
            # torch would map the packed bytes of a compressed member.
            for member in zipfile.ZipFile(same).infolist():
                if member.compress_type != zipfile.ZIP_STORED:
                    raise ValueError(f"{member.filename} is compressed")
            state = torch.load(same, map_location="cpu", weights_only=True, mmap=True)
        except Exception as e:  # torch raises a dozen kinds for files that are damaged
            raise CheckpointError(
                f"{path}: torch.load(weights_only=True) cannot read it ({_refusal(e)}); if it "
                f"holds a whole module, {PAGE} says what to do, else fetch it again"
            ) from e
    if not isinstance(state, dict) or not state:
        raise CheckpointError(f"{path}: not a state dict; save model.state_dict()")
    for name, tensor in state.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise CheckpointError(
                f"{path}: {sanitize(name)}: {type(tensor).__name__}, expected a tensor; save "
                "model.state_dict()"
            )
        in_one_piece = tensor.layout == torch.strided and tensor.is_contiguous()
        if not in_one_piece or tensor.is_meta or tensor.is_neg():
            raise CheckpointError(
                f"{path}: {sanitize(name)}: not stored in one piece, or as its negative; save it "
                "as .contiguous().clone()"
            )
    return {name: tensor.detach() for name, tensor in state.items()}


def _refusal(error: Exception) -> str:
    """What torch says is wrong, without its advice to load the file by running it."""
    if refused := _REFUSED_NAME.search(str(error)):
        return f"it names {sanitize(refused[1])}"
    return sanitize(str(error).partition(". ")[0] or type(error).__name__)


@contextmanager
def open_safetensors(path: Path, expected: str, framework: str = "np") -> Iterator[Any]:
    """Open `path` with the safetensors library, after its header is known to be small enough.

    The library checks dtypes and sizes, and that the tensors cover the data without overlap or
    gap. Raises CheckpointError if the file is not `expected`, e.g. "a statistics file".
    """
    with _accepted(path, expected, framework) as (_, tensors):
        yield tensors


@contextmanager
def _accepted(path: Path, expected: str, framework: str) -> Iterator[tuple[bytes, Any]]:
    """The JSON of the header, and the file as the library opens it."""
    with open_untrusted(path) as file:
        length = int.from_bytes(file.read(8), "little")
        if length > MAX_BYTES:
            raise CheckpointError(
                f"{path}: not {expected} (its header would be {length} bytes, at most {MAX_BYTES} "
                "are read)"
            )
        raw = file.read(length)
        try:
            # By its descriptor: another file may take its place at `path`.
            with safe_open(f"/dev/fd/{file.fileno()}", framework=framework) as tensors:
                yield raw, tensors
        except (OSError, SafetensorError) as e:
            raise CheckpointError(f"{path}: not {expected} ({e})") from e

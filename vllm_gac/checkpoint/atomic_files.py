"""Atomic writing: a file is either complete or absent, even after a power cut."""

import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from vllm_gac.checkpoint.untrusted_files import open_untrusted
from vllm_gac.errors import DiskError

if TYPE_CHECKING:
    import torch

# Numbers that are copied from a device at a time.
_PIECE = 1 << 22
# The prefix of temporary directories; those of a killed run are left behind.
TEMPORARY = ".vllm-gac-"


def write_text(path: Path, text: str) -> None:
    """Write `path` atomically: write a temporary file, sync it to disk, then rename it."""
    _write(path, lambda partial: partial.write_text(text, encoding="utf-8"))


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write `value` as indented JSON, atomically."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def copy_file(source: Path, path: Path) -> None:
    """Copy the contents of `source`, a regular file, atomically."""
    with open_untrusted(source) as file:

        def copy(partial: Path) -> None:
            with partial.open("wb") as copied:
                shutil.copyfileobj(file, copied)

        _write(path, copy)


def write_tensors(path: Path, tensors: Mapping[str, "torch.Tensor"]) -> None:
    """Write a safetensors file atomically."""
    from safetensors.torch import save_file

    _write(path, lambda partial: save_file(dict(tensors), partial, {"format": "pt"}))


def write_floats(
    path: Path,
    shapes: Mapping[str, Sequence[int]],
    tensors: Iterable["torch.Tensor"],
    metadata: Mapping[str, str],
) -> None:
    """Write a safetensors file of fp32 tensors atomically, with one of them in memory at a time.

    Args:
        path: The file.
        shapes: The shape of each tensor, by its name.
        tensors: The tensors, on any device, in the same order.
        metadata: What the header says beside them.
    """
    header = tensors_header({name: ("F32", shape) for name, shape in shapes.items()}, metadata)

    def write(partial: Path) -> None:
        with partial.open("wb") as file:
            file.write(header)
            for tensor in tensors:
                numbers = tensor.flatten()
                for start in range(0, len(numbers), _PIECE):
                    file.write(numbers[start : start + _PIECE].cpu().numpy().data)

    _write(path, write)


def tensors_header(
    tensors: Mapping[str, tuple[str, Sequence[int]]], metadata: Mapping[str, str]
) -> bytes:
    """What a safetensors file begins with whose tensors follow one another in this order.

    Args:
        tensors: By name, safetensors' name of the dtype, of four bytes a number, and the shape.
        metadata: What the header says beside them.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + 4 * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def sync_directory(directory: Path) -> None:
    """Make renames and removals in `directory` survive a power cut."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` write a temporary file, and rename it to `path`.

    Raises DiskError if the disk is full or not writable; then `path` is unchanged.
    """
    try:
        # In a directory of its own, what a killed writer leaves behind is never taken for a
        # complete file.
        with TemporaryDirectory(prefix=TEMPORARY, dir=path.parent) as directory:
            partial = Path(directory, path.name)
            partial.touch()
            mode = partial.stat().st_mode  # by the umask; safetensors makes its files private
            write(partial)
            partial.chmod(mode)
            with partial.open("rb+") as file:
                os.fsync(file.fileno())
            partial.replace(path)
        sync_directory(path.parent)
    except (OSError, SafetensorError) as e:
        reason = getattr(e, "strerror", None) or e
        raise DiskError(f"{path}: cannot be written ({reason})") from e

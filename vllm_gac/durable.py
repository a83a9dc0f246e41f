"""Files that are either there in full or not at all, also after a power cut."""

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from vllm_gac.errors import CheckpointError

if TYPE_CHECKING:
    import torch


def write_text(path: Path, text: str) -> None:
    """Write `path` atomically: beside it first, synced to disk, then renamed."""
    _write(path, lambda partial: partial.write_text(text, encoding="utf-8"))


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write `value` as indented JSON, atomically."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def write_bytes(path: Path, contents: bytes) -> None:
    """Write `contents`, atomically."""
    _write(path, lambda partial: partial.write_bytes(contents))


def copy_file(source: Path, path: Path) -> None:
    """Copy the contents of `source`, atomically."""
    _write(path, lambda partial: partial.write_bytes(source.read_bytes()))


def write_tensors(
    path: Path, tensors: Mapping[str, "torch.Tensor"], metadata: Mapping[str, str] | None = None
) -> None:
    """Write a safetensors file atomically."""
    from safetensors.torch import save_file

    _write(
        path, lambda partial: save_file(dict(tensors), partial, dict(metadata or {"format": "pt"}))
    )


def sync_directory(directory: Path) -> None:
    """Make renames and removals in `directory` survive a power cut."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write(path: Path, write: Callable[[Path], object]) -> None:
    """Raises CheckpointError if the disk is full or not writable; `path` is then as it was."""
    partial = path.with_name(path.name + ".tmp")
    try:
        partial.touch()
        mode = partial.stat().st_mode  # what the umask gives; safetensors makes files private
        write(partial)
        partial.chmod(mode)
        with partial.open("rb+") as file:
            os.fsync(file.fileno())
        partial.replace(path)
        sync_directory(path.parent)
    except (OSError, SafetensorError) as e:
        partial.unlink(missing_ok=True)
        raise CheckpointError(f"{path}: cannot be written ({e})") from e

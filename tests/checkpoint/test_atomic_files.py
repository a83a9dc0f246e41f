"""Files are complete or absent, at whichever step the disk becomes full."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from vllm_gac.checkpoint import atomic_files
from vllm_gac.errors import CheckpointError

STEPS: dict[str, tuple[Any, str]] = {
    "creating": (Path, "touch"),
    "syncing": (atomic_files.os, "fsync"),
    "renaming": (Path, "replace"),
}
WRITES: dict[str, Callable[[Path], None]] = {
    "text": lambda path: atomic_files.write_text(path, "new"),
    "JSON": lambda path: atomic_files.write_json(path, {"new": 1}),
    "tensors": lambda path: atomic_files.write_tensors(path, {"new": torch.zeros(2)}),
}


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("kind", WRITES)
def test_a_full_disk_leaves_the_file_as_it_was(
    kind: str, step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    full = Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    monkeypatch.setattr(*STEPS[step], full)
    with pytest.raises(CheckpointError, match=f"{tmp_path / 'file'}: .*No space left"):
        WRITES[kind](path)
    monkeypatch.undo()
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    WRITES[kind](path)
    assert path.read_bytes() != b"old"


def test_a_missing_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="gone/file"):
        atomic_files.write_text(tmp_path / "gone" / "file", "new")

"""Files that change, shrink or vanish between the preflight and the last tensor."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.serving.models import HETEROGENEOUS, write_model
from tests.serving.stubs import stream
from vllm_gac.errors import CheckpointError
from vllm_gac.serving.loading import loader as loader_module


def replaced(shard: Path) -> None:
    other = shard.with_name("other")
    other.write_bytes(shard.read_bytes() + b"\0" * 64)
    other.replace(shard)


def rewritten(shard: Path) -> None:
    with shard.open("r+b") as file:
        file.seek(-4096, os.SEEK_END)
        file.write(b"\x01" * 4096)


def turned_into_a_directory(shard: Path) -> None:
    shard.unlink()
    shard.mkdir()


CHANGES: dict[str, Callable[[Path], None]] = {
    "removed": Path.unlink,
    "emptied": lambda shard: os.truncate(shard, 0),
    "halved": lambda shard: os.truncate(shard, shard.stat().st_size // 2),
    "one byte short": lambda shard: os.truncate(shard, shard.stat().st_size - 1),
    "replaced": replaced,
    "rewritten": rewritten,
    "a directory": turned_into_a_directory,
}


def written(directory: Path) -> Path:
    write_model(directory, HETEROGENEOUS[:3])
    return directory


@pytest.mark.parametrize("case", CHANGES)
def test_a_change_between_preflight_and_first_tensor_is_refused(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = written(tmp_path / "model")
    preflight = loader_module.preflight

    def then_changed(*arguments: object) -> object:
        checkpoint = preflight(*arguments)
        CHANGES[case](directory / "model.safetensors")
        return checkpoint

    monkeypatch.setattr(loader_module, "preflight", then_changed)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        list(stream(directory))


@pytest.mark.parametrize("case", ["emptied", "halved", "rewritten"])
def test_a_change_during_loading_is_refused(case: str, tmp_path: Path) -> None:
    directory = written(tmp_path / "model")
    tensors = stream(directory)
    next(tensors)
    CHANGES[case](directory / "model.safetensors")
    # With a memory-mapped file, SIGBUS would kill the process here.
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        list(tensors)


def test_a_directory_deleted_during_loading_is_read_to_its_end(tmp_path: Path) -> None:
    directory = written(tmp_path / "model")
    expected = [name for name, _ in stream(directory)]
    tensors = stream(directory)
    first, _ = next(tensors)
    shutil.rmtree(directory)  # the open file keeps its content
    assert sorted([first, *(name for name, _ in tensors)]) == sorted(expected)

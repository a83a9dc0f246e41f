"""A pipe that takes the place of a file between the look at it and its opening blocks nobody."""

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_gac.checkpoint import regular_files
from vllm_gac.checkpoint.headers import TensorInfo, open_safetensors
from vllm_gac.checkpoint.strict_json import read_json
from vllm_gac.checkpoint.tensor_files import ShardFiles
from vllm_gac.errors import GacError
from vllm_gac.steps.calibration_text import sha256_of
from vllm_gac.texts.text_files import blocks


def stats(path: Path) -> object:
    with open_safetensors(path, "a statistics file") as file:
        return file.keys()


def shard(path: Path) -> object:
    files = ShardFiles(path.parent)
    files.read_into(TensorInfo(path.name, "F32", (1,), 0), memoryview(bytearray(4)))
    return files


READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "JSON": ("config.json", read_json),
    "a plain text": ("t.txt", lambda path: list(blocks(path.parent, path, None))),
    "lines of JSON": ("t.jsonl", lambda path: list(blocks(path.parent, path, None))),
    "gzipped lines": ("t.jsonl.gz", lambda path: list(blocks(path.parent, path, None))),
    "rows": ("t.parquet", lambda path: list(blocks(path.parent, path, None))),
    "a text's digest": ("t.txt", sha256_of),
    "statistics": ("stats.safetensors", stats),
    "a shard": ("model.safetensors", shard),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_file_that_becomes_a_pipe_is_not_waited_for(
    reader: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, read = READERS[reader]
    path = tmp_path / name
    path.write_bytes(b"x" * 64)
    look = regular_files._refuse_special

    def look_and_swap(found: Path, mode: int, error: type[GacError]) -> None:
        look(found, mode, error)
        if path.is_file():
            path.unlink()
            os.mkfifo(path)

    monkeypatch.setattr(regular_files, "_refuse_special", look_and_swap)
    said: list[str] = []

    def refused() -> None:
        with pytest.raises(GacError) as refusal:
            read(path)
        said.append(str(refusal.value))

    waiting = threading.Thread(target=refused, daemon=True)  # so that a failure ends, too
    waiting.start()
    waiting.join(60)
    assert said == [f"{path}: not a regular file but a pipe; save what it delivers as a file"]


def test_what_libraries_open_by_name_is_what_was_looked_at(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"good")
    with regular_files.unchanging(path) as same:
        path.unlink()
        path.write_bytes(b"evil")
        assert same.read_bytes() == b"good"

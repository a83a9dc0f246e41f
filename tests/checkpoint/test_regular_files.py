"""What is no regular file is refused, and not waited for."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_gac.checkpoint.headers import TensorInfo, open_safetensors
from vllm_gac.checkpoint.regular_files import unchanging
from vllm_gac.checkpoint.strict_json import read_json
from vllm_gac.checkpoint.tensor_files import ShardFiles
from vllm_gac.errors import GacError
from vllm_gac.steps.calibration_text import sha256_of


def stats(path: Path) -> None:
    with open_safetensors(path, "a statistics file"):
        pass


def shard(path: Path) -> None:
    info = TensorInfo(path.name, "F32", (1,), 0)
    ShardFiles(path.parent).read_into(info, memoryview(bytearray(4)))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("read", [read_json, stats, shard, sha256_of])
def test_a_pipe_is_refused(read: Callable[[Path], object], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "file")
    with pytest.raises(GacError, match=f"{tmp_path / 'file'}: .*pipe"):
        read(tmp_path / "file")


def test_what_libraries_open_by_name_is_what_was_looked_at(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"good")
    with unchanging(path) as same:
        path.unlink()
        path.write_bytes(b"evil")
        assert same.read_bytes() == b"good"

"""Pipes, devices, directories and sockets in place of the files that verbs read."""

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.command import error
from tests.support.dense_models import tokenizer
from tests.support.model_files import config, write_model


def a_socket(path: Path) -> None:
    socket.socket(socket.AF_UNIX).bind(str(path))


SPECIAL: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "a directory": Path.mkdir,
    "a socket": a_socket,
}
READERS: dict[str, tuple[str, ...]] = {
    "statistics": ("plan", "MODEL", "--param-ratio", "0.9", "--stats", "FILE"),
    "statistics, to compress": (
        *("compress", "MODEL", "--out", "OUT", "--param-ratio", "0.9", "--stats", "FILE"),
    ),
    "a plan": ("compress", "MODEL", "--out", "OUT", "--plan", "FILE"),
    "a profile": ("plan", "MODEL", "--param-ratio", "0.9", "--gpu", "FILE"),
    "a pickle": ("import", "FILE", "OUT"),
    "a text": ("evaluate", "MODEL", "--text", "FILE"),
}


@pytest.mark.parametrize("kind", SPECIAL)
@pytest.mark.parametrize("reader", READERS)
def test_special_files_are_refused_without_waiting(
    reader: str, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if (reader, kind) == ("a pickle", "a directory"):
        pytest.skip("a directory is a model")
    model = write_model(tmp_path / "model", config())
    (model / "tokenizer.json").write_text(json.dumps(tokenizer()))
    file = tmp_path / ("f.txt" if reader == "a text" else "f.json")
    SPECIAL[kind](file)
    paths = {"MODEL": model, "OUT": tmp_path / "out", "FILE": file}
    said = error(capsys, *(paths.get(part, part) for part in READERS[reader]))
    assert f"{file}: " in said

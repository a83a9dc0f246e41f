"""Small inputs that demand too much time or memory. None of them is a model directory."""

import json
import os
import socket
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import error
from tests.support.dense_models import tokenizer
from tests.support.model_files import config, gac_config, write_model
from vllm_gac.checkpoint.open import Checkpoint
from vllm_gac.checkpoint.writer import auxiliary_files, copy_auxiliary_files
from vllm_gac.errors import CheckpointError
from vllm_gac.layout.dims import layout_of
from vllm_gac.layout.schema import HfConfig
from vllm_gac.planning.planner import prior_plan
from vllm_gac.planning.request import PlanRequest


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
def test_a_file_that_is_none_is_not_waited_for(
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


def test_the_widest_model_is_planned_in_little_memory() -> None:
    raw = config(
        hidden_size=1 << 20,
        intermediate_size=1 << 18,
        num_hidden_layers=4,
        num_attention_heads=1024,
        num_key_value_heads=1024,
        head_dim=256,  # the most that an attention kernel takes
        vocab_size=1 << 22,
    )
    hf = HfConfig.model_validate(raw)
    model = Checkpoint(Path(), raw, hf, layout_of(raw), {})
    digest = property(lambda _: "0" * 64)
    model = type("Known", (Checkpoint,), {"config_sha256": digest})(**vars(model))
    tracemalloc.start()
    try:
        narrow: Any = {"key_form": "latent", "key_group": 1, "value_group": 1}
        plan = prior_plan(model, PlanRequest(param_ratio=0.9, kv_ratio=0.5, **narrow))
        assert tracemalloc.get_traced_memory()[1] < 60 << 20
    finally:
        tracemalloc.stop()
    assert plan.parameters.used <= plan.parameters.allowed


@pytest.mark.parametrize("name", ["LICENSE", "tokenizer.json", "chat_template.jinja"])
def test_what_lies_beside_a_model_is_copied_up_to_a_size(name: str, tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", gac_config())
    (model / "NOTICE").write_text("kept")
    (tmp_path / "out").mkdir()
    copy_auxiliary_files(model, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["NOTICE"]
    with (model / name).open("wb") as file:
        os.truncate(file.fileno(), 1 << 40)
    with pytest.raises(CheckpointError, match=f"{name}: 1099511627776"):
        auxiliary_files(model)


def test_and_up_to_a_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_model(tmp_path / "model", gac_config())
    for number in range(65):
        (model / f"tokenizer.{number}").touch()
    said = error(capsys, "repair", model, "--out", tmp_path / "out")
    assert f"{model}: " in said
    assert not (tmp_path / "out.partial").exists()

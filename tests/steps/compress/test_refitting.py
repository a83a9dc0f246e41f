"""What layers are refitted on is read from disk after a stop only."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.dense_models import config, write, write_text
from vllm_gac.checkpoint.atomic_files import write_floats
from vllm_gac.planning.request import PlanRequest
from vllm_gac.steps.compress import refitting
from vllm_gac.steps.compress.compress import compress
from vllm_gac.steps.compress.request import CompressRequest


def test_a_run_that_goes_on_reads_no_streams(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = []

    def kept(path: Path, *states: Any) -> None:
        written.append(path.name)
        write_floats(path, *states)

    def not_read(path: Path, shapes: object) -> None:
        raise AssertionError(path)

    monkeypatch.setattr(refitting, "write_floats", kept)
    monkeypatch.setattr(refitting, "kept_tensors", not_read)
    write(tmp_path / "model", config(num_hidden_layers=3))
    write_text(tmp_path / "text.txt")
    compress(
        tmp_path / "model",
        tmp_path / "out",
        PlanRequest(param_ratio=0.8, kv_ratio=0.75),
        CompressRequest(max_tokens=512, sequence_length=128),
        calibration=[tmp_path / "text.txt"],
        progress=False,
    )
    assert written == ["streams-0001.safetensors", "streams-0002.safetensors"]

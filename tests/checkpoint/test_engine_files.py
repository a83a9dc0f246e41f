"""What engines read beside the weights is refused before the work if they would refuse it."""

import os
from pathlib import Path

import pytest

pytest.importorskip("transformers")

import vllm_gac
from tests.support.model_files import config, write_model
from vllm_gac.errors import CheckpointError


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("generation_config.json", '{"temperature": NaN}'),
        ("generation_config.json", '\ufeff{"temperature": 1.0}'),
        ("tokenizer.json", '{"version": "1.0", "added_tok'),
        ("tokenizer.json", "version https://git-lfs.github.com/spec/v1"),
        ("tokenizer_config.json", "{"),
        ("chat_template.json", '{"chat_template": [{"name": "default"}]}'),
        ("chat_template.json", r'{"chat_template": "\ud800"}'),
    ],
)
def test_a_file_that_no_engine_can_read_is_refused(tmp_path: Path, file: str, text: str) -> None:
    model = write_model(tmp_path / "model", config())
    assert vllm_gac.verify(model).ok
    (model / file).write_text(text)
    (fault,) = vllm_gac.verify(model).faults
    assert fault.startswith(f"{model / file}: ")
    out = tmp_path / "out"
    for refuse in (
        lambda: vllm_gac.calibrate(model, [], out),
        lambda: vllm_gac.compress(model, out, vllm_gac.PlanRequest(param_ratio=0.5)),
        lambda: vllm_gac.repair(model, out),
        lambda: vllm_gac.evaluate(model, []),
    ):
        with pytest.raises(CheckpointError, match=file):
            refuse()
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer.json"])
def test_no_pipe_and_no_link_out_is_read(tmp_path: Path, name: str) -> None:
    model = write_model(tmp_path / "model", config())
    os.mkfifo(model / name)
    assert str(model / name) in vllm_gac.verify(model).faults[0]
    (model / name).rename(tmp_path / name)
    (model / name).symlink_to(tmp_path / name)
    assert str(model / name) in vllm_gac.verify(model).faults[0]

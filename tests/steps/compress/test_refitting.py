"""A run that was stopped between two layers refits the next one on what it would have."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.dense_models import config, write, write_text
from vllm_gac.errors import DiskError
from vllm_gac.planning.request import PlanRequest
from vllm_gac.steps.compress import write as writing
from vllm_gac.steps.compress.compress import compress
from vllm_gac.steps.compress.request import CompressRequest


def test_a_run_that_goes_on_makes_the_same_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "model", config(num_hidden_layers=3))
    write_text(tmp_path / "text.txt")
    make, made = writing.compress_layer, []

    def stopped(*arguments: Any) -> Any:
        if made:
            raise DiskError("full")
        made.append(arguments)
        return make(*arguments)

    def run(out: Path, resume: bool = False) -> None:
        compress(
            tmp_path / "model",
            out,
            PlanRequest(param_ratio=0.8, kv_ratio=0.75),
            CompressRequest(max_tokens=512, sequence_length=128),
            calibration=[tmp_path / "text.txt"],
            resume=resume,
            progress=False,
        )

    run(tmp_path / "whole")
    with monkeypatch.context() as patch:
        patch.setattr(writing, "compress_layer", stopped)
        with pytest.raises(DiskError):
            run(tmp_path / "resumed")
    run(tmp_path / "resumed", resume=True)
    whole, resumed = (
        {path.name: path.read_bytes() for path in sorted((tmp_path / name).glob("*.safetensors"))}
        for name in ("whole", "resumed")
    )
    assert whole == resumed

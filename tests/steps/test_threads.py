"""A run that goes on computes with as many threads as before, if that can be."""

import json
from pathlib import Path

import pytest
import torch

from vllm_gac.steps.threads import threads_of


@pytest.mark.parametrize(
    ("recorded", "expected"), [(3, 3), (0, None), (10**9, None), ("3", None), (None, None)]
)
def test_only_a_number_that_a_machine_can_have_is_taken(
    recorded: object, expected: int | None, tmp_path: Path
) -> None:
    partial = tmp_path / "out.partial"
    partial.mkdir()
    record = {"workspace": 2, "command": "heal", "run": {"threads": recorded}}
    (partial / "run.json").write_text(json.dumps(record))
    assert threads_of(tmp_path / "out") == (expected or torch.get_num_threads())

"""What the chosen model says of what was tried: config.json and the card agree."""

import json
from pathlib import Path

import pytest

from tests.support.hub import files_of
from vllm_gac.steps.max_loss.attempt import Attempt, record

TRIES = [
    Attempt(0.0055, 0.0054, 0.83, 1.013, 1.009, 1.017, 40_000, []),
    Attempt(0.003, 0.0029, 0.87, 1.006, 1.0035, 1.0085, 40_000, []),
    Attempt(0.004, 0.0039, 0.853, 1.008, 1.0055, 1.0098, 40_000, []),
]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"gac": {"source": {}}}')
    (tmp_path / "README.md").write_text("# A model\n")
    return tmp_path


def test_recording_twice_writes_the_attempts_once(model: Path) -> None:
    record(model, 0.01, TRIES[2], TRIES)
    written = files_of(model)
    record(model, 0.01, TRIES[2], TRIES)
    assert written == files_of(model)
    card = written["README.md"].decode()
    assert "| 0.0039 | 0.80 % | 0.55 to 0.98 % | 85.3% | this model |" in card
    source = json.loads(written["config.json"])["gac"]["source"]["max_loss"]
    assert source["asked"] == 0.01
    assert source["measured"] == source["tried"][2]

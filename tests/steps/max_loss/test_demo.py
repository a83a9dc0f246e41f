"""compress --max-loss on the demo model: the loss is kept to."""

import json
from pathlib import Path

import pytest

from tests.support.command import result
from vllm_gac.demo import HELD_OUT, MODEL

HELD_OUT_CHARACTERS = 40_000  # as few as give intervals of about a percent


@pytest.mark.slow
def test_the_measured_loss_is_within_the_asked_one(
    demo_statistics: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "held-out.txt").write_text(HELD_OUT.read_text()[:HELD_OUT_CHARACTERS])
    common = ("--method", "heads,prune", "--device", "cpu", "--quiet")
    out = tmp_path / "out"
    line = ("compress", MODEL, "--out", out, "--stats", demo_statistics, "--max-loss", 0.04)
    held_out = ("--held-out", tmp_path / "held-out.txt")
    printed = result(capsys, *line, *held_out, *common)["max_loss"]
    source = json.loads((out / "config.json").read_text())["gac"]["source"]
    assert printed == source["max_loss"]
    measured = printed["measured"]
    assert 1 < measured["ratio"] < measured["high"] <= 1.04
    assert measured["time"] < 1
    # What was written is what was measured, says a verb that knows nothing of the loop.
    against = ("--against", MODEL, "--text", tmp_path / "held-out.txt", "--device", "cpu")
    again = result(capsys, "evaluate", out, *against, "--quiet")
    assert again["ratio"] == pytest.approx(measured["ratio"], rel=1e-6)

"""compress --max-loss on the demo model: the loss is kept to."""

import json
from pathlib import Path

import pytest

from tests.support.command import result
from vllm_gac.demo import CALIBRATION, HELD_OUT, MODEL

# As little text as gives intervals of about a percent: what is tested is the loop, which has to
# meet the asked loss whatever the calibration is worth.
HELD_OUT_CHARACTERS, CALIBRATION_TOKENS = 40_000, 4096


@pytest.mark.slow
def test_the_measured_loss_is_within_the_asked_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "held-out.txt").write_text(HELD_OUT.read_text()[:HELD_OUT_CHARACTERS])
    stats = tmp_path / "stats.safetensors"
    common = ("--method", "heads,prune", "--device", "cpu", "--quiet")
    text = ("--text", CALIBRATION, "--max-tokens", CALIBRATION_TOKENS)
    result(capsys, "calibrate", MODEL, "--out", stats, *text, *common)
    out = tmp_path / "out"
    line = ("compress", MODEL, "--out", out, "--stats", stats, "--max-loss", 0.04)
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

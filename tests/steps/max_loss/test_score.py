"""compress --score: the loss that was asked for is how far a command's number falls."""

import json
import sys
from pathlib import Path

import pytest

from tests.support.command import error, result
from tests.support.dense_models import config, write, write_text
from tests.support.hub import files_of
from vllm_gac.errors import CommandError
from vllm_gac.steps.max_loss.score import found_by_score

# Of a compressed model, 50 less 20 times what its plan expects to lose. Fails once, on that.
SCORE = """
import json, pathlib, sys
directory, here = pathlib.Path(sys.argv[1]), pathlib.Path(__file__).parent
with (here / "scored").open("a") as file:
    print(directory.name, file=file)
plan = directory / "plan.json"
if plan.exists() and (here / "fail").exists():
    (here / "fail").unlink()
    print("no GPU")
    sys.exit(7)
lost = json.loads(plan.read_text())["expected_loss"] if plan.exists() else 0
print("a table")
print(50 - 20 * lost)
"""


def test_the_score_falls_by_no_more_than_was_asked_and_a_failed_command_loses_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "dense", config())
    write_text(tmp_path / "text.txt")
    (tmp_path / "score.py").write_text(SCORE)
    (tmp_path / "fail").touch()
    fewest = ("--max-loss", "2%", "--minimize", "bytes", "--method", "heads,prune")
    result(capsys, "plan", "dense", *fewest, "--out", "plan.json")
    line = (
        *("compress", "dense", "--out", "out", "--plan", "plan.json"),
        *("--calibration", "text.txt", "--max-tokens", 4096, "--device", "cpu", "--quiet"),
        *("--score", f"{sys.executable} score.py"),
    )
    said = error(capsys, *line)
    assert all(word in said for word in ("--score", "try-0", "status 7", "no GPU", "--resume"))
    reached = result(capsys, *line, "--resume")["max_loss"]
    scored = (tmp_path / "scored").read_text().split()
    assert scored == ["dense", *["model"] * (1 + len(reached["tried"]))]
    score, dense = reached["measured"]["scores"]
    assert dense == 50
    assert 50 * 0.98 <= score < 50
    assert f"| {score:g} | " in (tmp_path / "out" / "README.md").read_text()
    config_now = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config_now["gac"]["source"]["max_loss"] == reached
    before = files_of(tmp_path / "out")
    assert result(capsys, *line, "--resume")["max_loss"] == reached
    assert files_of(tmp_path / "out") == before


@pytest.mark.parametrize("printed", ["", "72 %", "nan", "1e999", "0", "-3"])
def test_an_invalid_score_is_refused(printed: str, tmp_path: Path) -> None:
    (tmp_path / "score.py").write_text(f"print({printed!r})")
    command = f"{sys.executable} {tmp_path / 'score.py'}"
    with pytest.raises(CommandError) as caught:
        found_by_score(command, tmp_path, tmp_path / "dense", tmp_path)
    assert all(word in str(caught.value) for word in ("--score", "dense", printed))
    assert not (tmp_path / "dense_score.json").exists()


def test_a_better_score_than_the_dense_model_s_is_no_loss(tmp_path: Path) -> None:
    (tmp_path / "score.py").write_text("import sys\nprint(9 if 'dense' in sys.argv[1] else 99)")
    command = f"{sys.executable} {tmp_path / 'score.py'}"
    found = found_by_score(command, tmp_path / "model", tmp_path / "dense", tmp_path)
    assert 0 < found.ratio < 1
    assert found.scores == (99, 9)

"""The command line writes its files, and prints errors as one line without a traceback."""

from pathlib import Path

import pytest

import loadtest
from loadtest.__main__ import main
from loadtest.traffic.schedule import read_schedule

COMPARISON = Path(loadtest.__file__).parent / "comparisons" / "h200-fp8.yaml"


def test_a_shipped_scenario_becomes_a_schedule(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "s.jsonl"
    options = ["--rate", "3", "--duration", "20", "--seed", "4", "--max-model-len", "500"]
    assert main(["schedule", "azure-code", str(out), *options]) == 0
    schedule = read_schedule(out)
    scenario = schedule.traffic["scenario"]
    assert (scenario["rate"], scenario["duration"], scenario["seed"]) == (3, 20, 4)
    assert all(r.input_length + r.output_length <= 500 for r in schedule.requests)
    assert f"{len(schedule.requests)} requests in 20 s" in capsys.readouterr().out


@pytest.mark.parametrize("there", ["s.jsonl", "s.traffic.json"])
def test_a_schedule_that_is_there_is_kept(
    there: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / there).write_text("mine")
    assert main(["schedule", "smoke", str(tmp_path / "s.jsonl")]) == 1
    assert f"{there}: exists already; remove it" in capsys.readouterr().err
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]


def test_a_comparison_can_be_of_some_of_its_traffic(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["ab", str(COMPARISON), str(tmp_path), "--side-by-side", "--dry-run"]
    assert main([*command, "--traffic", "agents", "--repeats", "3"]) == 0
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith("agents at 8/s: 3 servers x 3 repeats")
    assert last.startswith("about 9 min, and 9 starts of a server, in 3 rounds side by side")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["schedule", "azure", "s.jsonl"], "no scenario 'azure'; there are agents, azure-code"),
        (["schedule", "missing.yaml", "s.jsonl"], "missing.yaml: cannot be read: No such file"),
        (["schedule", "smoke", "s.jsonl", "--rate", "-1"], "smoke.yaml with rate -1.0: rate: Inp"),
        (
            ["schedule", "smoke", "/dev/null/s.jsonl"],
            "/dev/null/s.traffic.json: cannot be written (Not a directory)",
        ),
        (["ab", "missing.yaml", "out"], "missing.yaml: cannot be read: No such file"),
        (["ab", str(COMPARISON), "out", "--repeats", "101"], "repeats 101: "),
        (["ab", str(COMPARISON), "out", "--traffic", "x"], "--traffic x: the file has azure"),
        (["report", "r.html", "run", "--margin", "5%"], "--margin"),
        (["report", "r.html", "run", "--these-starts"], "--these-starts"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1

"""A/B files, and a whole comparison of two mock servers."""

import json
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import loadtest
from loadtest.errors import LoadTestError

pytest.importorskip("matplotlib", reason="needs the extra `loadtest`")

from loadtest.ab import load_comparison, run_comparison
from tests.loadtest.test_server import free_port

SHIPPED = sorted((Path(loadtest.__file__).parent / "comparisons").glob("*.yaml"))
TEXT = """
title: Two mocks
scenario: smoke
baseline: slow
rates: [5]
duration: 3
repeats: 2
warmup: 1
port: {port}
ideal: ["fast:decode=2.0"]
servers:
  - {{label: slow, model: mock, command: "{python} -m loadtest mock --port {{port}} --itl 0.04"}}
  - {{label: fast, model: mock, command: "{python} -m loadtest mock --port {{port}} --itl 0.02"}}
"""


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_comparisons_are_right(path: Path) -> None:
    comparison = load_comparison(path)
    assert all("{port}" in server.command for server in comparison.servers)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("title: x", "scenario: Field required"),
        (TEXT.replace("baseline: slow", "baseline: none"), "one must be the baseline's"),
        (TEXT.replace("label: fast", "label: slow"), "labels must differ"),
        (TEXT.replace("label: fast", "label: ../fast"), "servers.1.label"),
    ],
)
def test_a_wrong_file_is_one_clear_error(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "ab.yaml"
    path.write_text(text.format(port=8100, python="python"))
    with pytest.raises(LoadTestError, match=message):
        load_comparison(path)


@pytest.mark.slow
def test_a_comparison_runs_every_server_in_alternating_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if find_spec("locust") is None:  # not imported: that would patch every socket of the tests
        pytest.skip("needs the extra `loadtest` (locust)")
    path = tmp_path / "ab.yaml"
    path.write_text(TEXT.format(port=free_port(), python=sys.executable))
    report = run_comparison(load_comparison(path), tmp_path / "out")
    started = [line.split(":")[0] for line in capsys.readouterr().out.splitlines() if "-m" in line]
    assert started == ["slow-1", "fast-1", "fast-2", "slow-2"]
    content = json.loads(report.with_suffix(".json").read_text())
    assert len(content["runs"]) == 4
    assert len({run["schedule_sha256"] for run in content["runs"]}) == 1
    speedup = content["comparisons"][0]["speedup"]["tpot"]["p50"]["value"]
    assert speedup == pytest.approx(2.0, rel=0.1)
    with pytest.raises(LoadTestError, match="holds runs already"):
        run_comparison(load_comparison(path), tmp_path / "out")

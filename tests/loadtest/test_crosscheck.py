"""This client and `vllm bench serve` agree if both replay one schedule against one server."""

import json
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from loadtest.crosscheck import Agreement, markdown
from loadtest.traffic.schedule import read_schedule
from tests.loadtest.locusts import PRIORITY, ROOT, is_installed, written_schedule
from vllm_gac import demo

TRIES = 3


@pytest.mark.parametrize(
    ("ours", "theirs", "agrees"),
    [(104.9, 100, True), (105.1, 100, False), (95.1, 100, True), (94.9, 100, False)],
)
def test_five_percent_either_way_is_agreement(ours: float, theirs: float, agrees: bool) -> None:
    found = Agreement("TTFT p50, ms", ours, theirs, judged=True)
    assert found.agrees is agrees
    assert markdown([found]).splitlines()[-1].endswith("| yes |" if agrees else "| NO |")


@pytest.fixture
def mock() -> Iterator[str]:
    # As slow as a server under load: what a busy machine adds matters less.
    timing = ["--ttft", "0.5", "--itl", "0.05"]
    command = [*PRIORITY, sys.executable, "-m", "loadtest", "mock", "--port", "0", *timing]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        yield server.stdout.readline().strip()
        server.terminate()


@pytest.mark.slow
def test_vllm_bench_serve_measures_the_same(mock: str, tmp_path: Path) -> None:
    if not is_installed():
        pytest.skip("needs the extra `loadtest` (locust)")
    if find_spec("vllm") is None:
        pytest.skip("needs vllm")
    schedule = written_schedule(tmp_path, rate=5, duration=15, output=40)
    for number in range(TRIES):  # a machine that is busy otherwise makes either late
        out = tmp_path / str(number)
        command = [
            *PRIORITY,
            *(sys.executable, "-m", "loadtest", "crosscheck", str(schedule), str(out)),
            *("--host", mock, "--model", "mock", "--tokenizer", str(demo.MODEL)),
        ]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            break
    if "INVALID" in done.stderr:
        pytest.skip(f"this machine is too busy to time anything: {done.stderr}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("| yes |") == 5
    written = json.loads((out / "crosscheck.json").read_text())
    assert written["requests"] == len(read_schedule(schedule).requests)
    assert written["numbers"]["ITL p50, ms"]["theirs"] == pytest.approx(50, rel=0.05)

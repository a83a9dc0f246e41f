"""This client and `vllm bench serve` agree if both replay one schedule against one server."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadtest.crosscheck import Agreement, crosscheck, markdown
from loadtest.errors import LoadTestError
from loadtest.traffic.schedule import read_schedule
from tests.loadtest.locusts import PRIORITY, ROOT, written_schedule
from vllm_gac import demo

TRIES = 6
TTFT, ITL, TOKENS = 0.5, 0.05, 40
# What a client that is not held up sees of the mock, in milliseconds.
TRUE = {
    "TTFT p50, ms": 1e3 * TTFT,
    "ITL p50, ms": 1e3 * ITL,
    "answer p50, ms": 1e3 * (TTFT + (TOKENS - 1) * ITL),
}


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
    timing = ["--ttft", str(TTFT), "--itl", str(ITL)]
    command = [*PRIORITY, sys.executable, "-m", "loadtest", "mock", "--port", "0", *timing]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        yield server.stdout.readline().strip()
        server.terminate()


@pytest.mark.parametrize(
    "more", [{"session_id": "a"}, {"body": {"model": "lora"}}, {"cancel_after": 9}]
)
def test_what_the_other_client_would_not_do_is_refused(
    more: dict[str, object], tmp_path: Path
) -> None:
    line = {"timestamp": 0, "input_length": 1, "output_length": 1, **more}
    (tmp_path / "s.jsonl").write_text(json.dumps(line) + "\n")
    with pytest.raises(LoadTestError, match="has sessions, bodies or clients that hang up"):
        crosscheck(tmp_path / "s.jsonl", "http://127.0.0.1:9", "m", "m", tmp_path / "out")


@pytest.mark.slow
@pytest.mark.needs("locust")
@pytest.mark.needs("vllm")
def test_vllm_bench_serve_measures_the_same(mock: str, tmp_path: Path) -> None:
    schedule = written_schedule(tmp_path, rate=5, duration=15, output=TOKENS)
    # The mock's answers are known. Where they reach vLLM's client late, the machine is busy, and
    # that the two differ then says nothing.
    differences = []
    for number in range(TRIES):
        out = tmp_path / str(number)
        command = [
            *PRIORITY,
            *(sys.executable, "-m", "loadtest", "crosscheck", str(schedule), str(out)),
            *("--host", mock, "--model", "mock", "--tokenizer", str(demo.MODEL)),
        ]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0 or "INVALID" in done.stderr or "NO |" in done.stdout, (
            done.stdout + done.stderr
        )
        if "INVALID" in done.stderr:
            continue
        written = json.loads((out / "crosscheck.json").read_text())
        assert written["requests"] == len(read_schedule(schedule).requests)
        if done.returncode == 0:
            assert done.stdout.count("| yes |") == 5
            return
        theirs = {name: written["numbers"][name]["theirs"] for name in TRUE}
        if theirs == pytest.approx(TRUE, rel=0.02):
            differences.append(done.stdout)
        assert len(differences) < 3, differences
    pytest.skip("this machine is too busy to time anything")

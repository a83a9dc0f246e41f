"""The whole client under locust, against a server with known answers."""

import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import psutil
import pytest

from loadtest.client.command import client_command
from loadtest.runs.run import load_run
from loadtest.traffic.generate import generate
from loadtest.traffic.schedule import read_schedule, write_schedule
from tests.loadtest.runs import scenario
from tests.support.local_servers import free_port
from tests.support.waiting import PATIENCE, wait_until

pytestmark = pytest.mark.needs("locust")
ROOT = Path(__file__).parents[2]
LOCUSTFILE = Path(__file__).with_name("patient_locustfile.py")


def written_schedule(directory: Path, rate: float, duration: float, output: int) -> Path:
    lengths = {"input": 32, "output": output}
    path = directory / "schedule.jsonl"
    write_schedule(generate(scenario(lengths=lengths, rate=rate, duration=duration)), path)
    return path


def started(schedule: Path, url: str, out: Path, *more: str) -> subprocess.Popen[str]:
    """The client as users start it; all that it prints is one stream."""
    command = client_command(url, "mock", schedule, out, *more)
    command[command.index("-f") + 1] = str(LOCUSTFILE)
    into: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=ROOT, **into)


def ended(*arguments: Any) -> tuple[int, str]:
    """The exit status of the client, and what it has printed."""
    with started(*arguments) as process:
        output, _ = process.communicate(timeout=600)
    return process.returncode, output


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The mock in a process of its own: it must not share the client's or the test's time."""
    mock = [sys.executable, "-m", "loadtest", "mock", "--port", "0"]
    with subprocess.Popen(mock, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.terminate()


def test_processes_share_the_schedule_and_leave_one_record_per_request(
    server: str, tmp_path: Path
) -> None:
    path = written_schedule(tmp_path, rate=15, duration=2, output=4)
    *others, last = read_schedule(path).requests
    refused = last.model_copy(update={"body": {"max_tokens": "many"}})
    write_schedule(replace(read_schedule(path), requests=(*others, refused)), path)
    more = ("--processes", "2", "--label", "it")
    status, output = ended(path, server, tmp_path / "run", *more)
    # A failure is a result. 3 on a machine that is busy otherwise.
    assert status in (0, 3), output
    run = load_run(tmp_path / "run")
    count = len(run.schedule.requests)
    assert [record.index for record in run.records] == list(range(count))
    *answered, failed = run.records
    assert (failed.status, failed.ok) == (400, False)
    for record in answered:
        assert record.error is None
        assert (record.prompt_tokens, record.completion_tokens, len(record.tokens)) == (32, 4, 4)
        # The mock sends the first token 0.1 s after the request comes, then one each 0.02 s.
        assert record.tokens[0] - record.sent > 0.0999
        assert record.tokens[3] - record.sent > 0.1599
    if status == 0:
        assert median(record.ttft for record in answered) < 0.15
        assert median(record.tpot for record in answered) < 0.03
    assert [process.process for process in run.processes] == [0, 1]
    assert (tmp_path / "run" / "records.1.jsonl").read_text().count("\n") == count // 2
    assert run.info["label"] == "it"
    assert "--processes 2" in run.info["command"]
    # Locust's own table is of the same requests. On a busy machine the last report of a worker may
    # come after the table, so it may show fewer.
    in_table = re.search(r"LLM +ttft +(\d+) ", output)
    assert in_table
    assert 0 < int(in_table[1]) <= count


def test_ctrl_c_keeps_the_records_and_says_invalid(server: str, tmp_path: Path) -> None:
    schedule = written_schedule(tmp_path, rate=10, duration=600, output=2)
    out = tmp_path / "run"
    with started(schedule, server, out, "--processes", "2") as process:
        records = [out / "records.0.jsonl", out / "records.1.jsonl"]
        wait_until(
            lambda: all(p.exists() and p.stat().st_size for p in records), PATIENCE, "records"
        )
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=600)
    assert process.returncode == 3
    assert "scheduled requests left no record" in output
    assert load_run(out).records


@pytest.mark.slow
def test_a_client_that_freezes_again_and_again_is_invalid(server: str, tmp_path: Path) -> None:
    schedule = written_schedule(tmp_path, rate=20, duration=8, output=30)
    with started(schedule, server, tmp_path / "run") as process:
        while process.poll() is None:
            time.sleep(2.2)
            process.send_signal(signal.SIGSTOP)
            time.sleep(0.09)
            process.send_signal(signal.SIGCONT)
        output, _ = process.communicate()
    assert process.returncode == 3
    assert "INVALID: process 0 woke" in output


def test_a_wrong_schedule_is_one_line_before_any_request(server: str, tmp_path: Path) -> None:
    path = tmp_path / "schedule.jsonl"
    path.write_text("{}")
    status, output = ended(path, server, tmp_path / "run", "--processes", "2")
    assert status == 2
    # No worker is left that looks for its master until it gives up.
    assert not re.search(r"Failed to connect to master .* retry (\d+)/\1\b", output)
    assert output.count("error: ") == 1
    assert "schedule.jsonl:1: timestamp: Field required" in output
    assert "Traceback" not in output
    assert not (tmp_path / "run").exists()


def test_a_run_is_never_overwritten(server: str, tmp_path: Path) -> None:
    schedule = written_schedule(tmp_path, rate=5, duration=1, output=2)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text(json.dumps({"precious": 1}))
    status, output = ended(schedule, server, tmp_path / "run")
    assert status == 2
    assert "holds a run already" in output
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["run.json"]


@pytest.fixture
def another_run() -> Iterator[None]:
    """Locust's usual port is taken."""
    with socket.socket() as taken:
        with contextlib.suppress(OSError):  # by somebody else: so much the better
            taken.bind(("127.0.0.1", 5557))
            taken.listen()
        yield


@pytest.mark.usefixtures("another_run")
def test_failed_requests_are_results_and_the_master_is_on_loopback(tmp_path: Path) -> None:
    schedule = written_schedule(tmp_path, rate=10, duration=2, output=2)
    out = tmp_path / "run"
    nowhere = f"http://127.0.0.1:{free_port()}"
    with started(schedule, nowhere, out, "--processes", "2") as process:
        wait_until(
            lambda: process.poll() is not None or (out / "run.json").exists(), PATIENCE, "a run"
        )
        listening = {
            connection.laddr.ip
            for connection in psutil.Process(process.pid).net_connections()
            if connection.status == psutil.CONN_LISTEN
        }
        output, _ = process.communicate(timeout=600)
    assert process.returncode == 1  # such a run tells nothing
    assert "every request failed, such as by ConnectionRefusedError" in output
    assert listening == {"127.0.0.1"}
    run = load_run(out)
    assert len(run.records) == len(run.schedule.requests), output
    assert not any(record.ok for record in run.records)
    assert not any("own fault" in reason for reason in run.verdict.reasons)

"""A run is INVALID exactly when its client was late, busy or incomplete."""

import json
import math
import socket
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from loadtest.errors import LoadTestError
from loadtest.runs import health
from loadtest.runs.health import HealthMonitor, ProcessHealth, late_at_any_moment
from loadtest.runs.records import kind
from loadtest.runs.run import begin_run, load_run
from loadtest.runs.target import Target
from loadtest.runs.verdict import judge
from tests.loadtest.runs import write_run
from tests.loadtest.servers import scripted

HEALTHY = ProcessHealth(0, 0.5, 0.0001, 0.001, 0.002)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"lag": 0.02, "ttft": 0.2}, "requests were sent 20.0 ms late"),
        ({"wake": 0.02, "itl": 0.02}, "process 0 woke 20.0 ms late"),
        # Shares of what is measured.
        ({"lag": 0.009, "ttft": 0.029}, "requests were sent 9.0 ms late"),
        ({"wake": 0.009, "itl": 0.003}, "process 0 woke 9.0 ms late"),
        ({"lag": 0.02, "ttft": 2.0}, None),
    ],
)
def test_a_client_that_is_late_for_what_it_measures_is_invalid(
    tmp_path: Path, changes: dict[str, float], reason: str | None
) -> None:
    verdict = load_run(write_run(tmp_path / "a", **changes)).verdict  # type: ignore[arg-type]
    assert verdict.lag_p99 == pytest.approx(changes.get("lag", 0.001), abs=1e-5)
    assert len(verdict.reasons) == (reason is not None)
    assert reason is None or reason in verdict.reasons[0]


def test_a_busy_process_is_invalid(tmp_path: Path) -> None:
    records = load_run(write_run(tmp_path / "a")).records
    busy = ProcessHealth(1, 0.97, 0.0001, 0.001, 0.002)
    (reason,) = judge(records, [HEALTHY, busy], len(records), 2).reasons
    assert reason.startswith("process 1 used 97% of a core, limit 80%")


def test_lateness_at_any_moment_is_what_random_moments_meet() -> None:
    rng = np.random.default_rng(0)
    late = rng.exponential(0.01, 200)
    edges = np.concatenate(([0.0], np.cumsum(late + 0.02)))
    moments = rng.uniform(0, edges[-1], 200_000)
    sleep = np.searchsorted(edges, moments, side="right") - 1
    left = edges[sleep + 1] - moments
    asleep = np.where(left <= late[sleep], left, 0.0)
    assert late_at_any_moment(late, 99) == pytest.approx(np.percentile(asleep, 99), rel=0.03)
    assert late_at_any_moment([0.0] * 5, 99) == 0


def test_a_process_that_sleeps_longer_than_it_wants_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds + 0.09

    clock = SimpleNamespace(sleep=sleep, perf_counter=lambda: now, process_time=time.process_time)
    monkeypatch.setattr(health, "time", clock)
    seen = HealthMonitor(1).stop()
    assert seen.process == 1
    assert 0.08 < seen.wake_p99 < seen.wake_max == pytest.approx(0.09)


def test_the_clients_own_failures_are_not_the_servers(tmp_path: Path) -> None:
    records = load_run(write_run(tmp_path / "a")).records
    for record in records[:7]:
        record.tokens, record.error = [], "client: OSError: [Errno 24] Too many open files"
    (reason,) = judge(records, [HEALTHY], len(records), 1).reasons
    assert reason.startswith(f"7 of {len(records)} requests failed by the client's own fault")
    assert "Too many open files" in reason


def test_errors_that_differ_in_numbers_are_of_one_kind() -> None:
    ports = [f"ConnectionResetError: [Errno 104] 127.0.0.1:{port} reset" for port in (50211, 7)]
    assert len({kind(error) for error in ports}) == 1
    bodies = ['HTTP 503: {"id": "a-1"}', "HTTP 503: busy"]
    assert {kind(error) for error in bodies} == {"HTTP 503"}
    assert kind("HTTP 500: busy") != kind("HTTP 503: busy")


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    records = load_run(write_run(tmp_path / "a")).records
    reasons = judge(records[:-3], [HEALTHY], len(records), 2).reasons
    assert reasons == (
        f"3 of {len(records)} scheduled requests left no record",
        "1 of 2 client processes finished",
    )
    assert not judge([], [], 5, 1).valid


def test_a_directory_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LoadTestError, match=str(tmp_path)):
        load_run(tmp_path)
    (tmp_path / "run.json").write_text('{"processes": 1}')
    with pytest.raises(LoadTestError, match=r"label.*start_at"):
        load_run(tmp_path)


@pytest.mark.parametrize(
    ("file", "key", "value"),
    [
        ("run.json", "processes", 0),
        ("run.json", "label", ["dense"]),
        ("run.json", "start_at", math.nan),
        ("run.json", "hardware", 5),
        ("run.json", "versions", None),
        ("run.json", "window", [0]),
        ("health.0.json", "cpu", "high"),
        ("health.0.json", "wake_p99", math.nan),
        ("records.0.jsonl", "completion_tokens", "many"),
        ("records.0.jsonl", "error", ["busy"]),
        ("records.0.jsonl", "tokens", [1.5, None]),
        ("records.0.jsonl", "index", "0"),
        ("records.0.jsonl", "place", 0),
    ],
)
def test_a_value_that_cannot_be_is_named(
    file: str, key: str, value: object, tmp_path: Path
) -> None:
    path = write_run(tmp_path / "a") / file
    lines = path.suffix == ".jsonl"
    first, *others = path.read_text().splitlines(keepends=True) if lines else [path.read_text()]
    path.write_text(json.dumps(json.loads(first) | {key: value}) + "\n" + "".join(others))
    where = rf"{tmp_path / 'a'}.*{':1' * lines}.*(: {key}|number)"
    with pytest.raises(LoadTestError, match=where):
        load_run(path.parent)


@pytest.mark.parametrize("file", ["run.json", "records.0.jsonl", "health.0.json"])
@pytest.mark.parametrize("content", [b"", b"\xff\n", b"[" * 100_000, b"[]"])
def test_a_file_that_is_none_is_refused(file: str, content: bytes, tmp_path: Path) -> None:
    run = write_run(tmp_path / "a")
    (run / file).write_bytes(content)
    if (file, content) == ("records.0.jsonl", b""):
        assert load_run(run).verdict.reasons[0].endswith("scheduled requests left no record")
        return
    with pytest.raises(LoadTestError, match=file):
        load_run(run)


@pytest.mark.parametrize("keep", [slice(5), slice(1, None)])
def test_records_of_another_schedule_are_refused(tmp_path: Path, keep: slice) -> None:
    run = write_run(tmp_path / "a")
    lines = (run / "schedule.jsonl").read_text().splitlines(keepends=True)
    (run / "schedule.jsonl").write_text("".join(lines[keep]))
    with pytest.raises(LoadTestError, match=str(run)):
        load_run(run)


def test_a_run_starts_after_the_server_has_told_its_version(tmp_path: Path) -> None:
    told = []

    def play(connection: socket.socket) -> None:
        told.append(time.time())
        connection.sendall(b'HTTP/1.1 200 OK\r\nContent-Length: 18\r\n\r\n{"version": "1.2"}')

    schedule = write_run(tmp_path / "a") / "schedule.jsonl"
    with scripted(play) as url:
        start = begin_run(tmp_path / "b", schedule, Target(url, "m"), "", 1, lead=7.0)
    # However long that took.
    assert start >= told[0] + 7.0
    info = json.loads((tmp_path / "b" / "run.json").read_text())
    assert (info["start_at"], info["server_version"]) == (start, "1.2")
    # Two servers may share a model's name.
    assert info["label"] == f"m at {url.removeprefix('http://')}"

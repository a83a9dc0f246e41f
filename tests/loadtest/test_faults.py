"""The report says of a server and of a client with faults what the server's own log knows."""

import json
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from loadtest.client.command import client_command
from loadtest.report.intervals import Floats
from loadtest.report.summary import group_runs, summarize
from loadtest.runs.run import Run, load_run
from loadtest.traffic import prompts
from tests.loadtest.test_locust import ROOT, written_schedule

SECONDS, DRAIN = 8.0, 4.0
FROZEN, EVERY = 0.09, 2.3  # seconds
# A token that arrives later than this after it left, in seconds, was delayed by the machine. The
# client that the trial freezes is 0.09 s late at most.
LATE = 0.2
# Fault of the server, of every which request, whether the client is frozen again and again.
# test_client.py has the others.
TRIALS = [("refuse", 2, False), ("hang", 100, False), ("stall", 50, False), ("none", 1, True)]


def run_of(directory: Path, fault: str, every: int, frozen: bool) -> Run:
    """A run of the client against the mock, whose log lies beside it."""
    schedule = written_schedule(directory, rate=20, duration=SECONDS, output=30)
    server = [sys.executable, "-m", "tests.loadtest.faulty_server", fault, str(every)]
    server += [str(directory / "sent.jsonl")]
    with subprocess.Popen(server, cwd=ROOT, stdout=subprocess.PIPE, text=True) as mock:
        assert mock.stdout is not None
        try:
            url, out = mock.stdout.readline().strip(), directory / "run"
            command = client_command(url, "mock", schedule, out, "--drain", str(DRAIN))
            with subprocess.Popen(command, cwd=ROOT) as client:
                done = threading.Event()
                freezer = threading.Thread(target=_freeze, args=(client.pid, done), daemon=True)
                if frozen:
                    freezer.start()
                client.wait()
                done.set()
        finally:
            mock.terminate()
    assert client.returncode in ((3,) if frozen else (0, 3))
    return load_run(directory / "run")


def _freeze(process: int, done: threading.Event) -> None:
    try:
        while not done.wait(EVERY - FROZEN):
            os.kill(process, signal.SIGSTOP)
            done.wait(FROZEN)
            os.kill(process, signal.SIGCONT)
    except ProcessLookupError:
        return


def tokens_sent(run: Run, log: Path) -> Iterator[Floats]:
    """When each token left the mock: [tokens] seconds of the run for each request.

    Empty for a request that the mock never had, or failed on purpose.
    """
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    by_opening = {tuple(line["opening"]): line["sent"] for line in lines}
    for index, request in enumerate(run.schedule.requests):
        opening = tuple(prompts.token_ids(request, index, run.schedule.prompts)[:8])
        yield np.array(by_opening.get(opening, []), dtype=float) - run.info["start_at"]


@pytest.mark.slow
@pytest.mark.needs("locust")
@pytest.mark.parametrize(("fault", "every", "frozen"), TRIALS)
def test_the_report_says_what_the_server_knows(
    fault: str, every: int, frozen: bool, tmp_path: Path
) -> None:
    run = run_of(tmp_path, fault, every, frozen)
    summary = summarize(group_runs([run])[0])
    failed = good = unclear = 0
    end = SECONDS + DRAIN
    sent_times = tokens_sent(run, tmp_path / "sent.jsonl")
    for request, record, sent in zip(run.schedule.requests, run.records, sent_times, strict=True):
        if len(sent) == 0:
            failed += 1
            continue
        ttft, tpot = sent[0] - request.timestamp / 1000, np.diff(sent).mean()
        good += ttft <= 1.0 and tpot <= 0.05
        # What the client may rightly judge differently. A machine left alone has none.
        close = abs(ttft - 1.0) < LATE or abs(tpot - 0.05) < LATE / (len(sent) - 1)
        late = any(seen - left > LATE for seen, left in zip(record.tokens, sent, strict=False))
        unclear += close or late or bool(sent[-1] > end - LATE)
    assert abs(summary.failed - failed) <= unclear
    assert abs(summary.goodput.value * SECONDS - good) <= unclear + 0.1
    if frozen:
        assert any("woke" in said for said in run.verdict.reasons)
    if fault == "refuse":
        assert math.isinf(summary.latency["ttft"][99.0].value)
    if fault == "stall" and unclear == 0:
        assert summary.latency["gap"][99.0].value > 0.5 - LATE

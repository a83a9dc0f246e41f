"""The client measures what a server of known timing did, or says that it could not.

The mock, the client and this test run in separate processes. The mock writes when each token really
left, so what the machine delays is in its log, too.
"""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from loadtest.report.intervals import Floats
from loadtest.runs.run import Run, load_run
from loadtest.traffic import prompts
from tests.loadtest.locusts import PRIORITY, ROOT, locust, written_schedule

TTFT, ITL = 0.100, 0.020
# The share of tokens that may arrive together although they left apart. A machine that wakes the
# client late once in a hundred times makes it 1 %. A reader into a buffer of 1 KB shows 86 %.
HELD_BACK = 0.02


@pytest.mark.slow
@pytest.mark.needs("locust")
def test_a_run_is_right_or_says_that_it_is_not(tmp_path: Path) -> None:
    # At 93 answers of 1.08 s per second, 100 users at a time.
    schedule = written_schedule(tmp_path, rate=93, duration=8, output=50)
    log = tmp_path / "sent.jsonl"
    mock = [*PRIORITY, sys.executable, "-m", "tests.loadtest.faulty_server", "none", "1", str(log)]
    mock += [str(TTFT), str(ITL)]
    with subprocess.Popen(mock, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            url = server.stdout.readline().strip()
            done = locust(schedule, url, tmp_path / "run", "--processes", "2")
        finally:
            server.terminate()
    assert done.returncode in (0, 3), done.stderr
    run = load_run(tmp_path / "run")
    assert [record.error for record in run.records] == [None] * len(run.schedule.requests)
    arrived, sent = what_happened(run, log)
    received = np.array([record.tokens for record in run.records])
    assert received.shape == sent.shape == (len(run.schedule.requests), 50)
    assert (received - sent).min() > -0.001  # nothing is seen before it was sent
    # Nor is anything asked before its time, which is a whole millisecond.
    assert min(record.lag for record in run.records) >= 0
    if not run.verdict.valid:
        return
    itls, sent_itls = np.diff(received), np.diff(sent)
    assert np.median(itls) == pytest.approx(np.median(sent_itls), rel=0.02)
    assert np.mean(itls) == pytest.approx(np.mean(sent_itls), rel=0.02)
    assert np.mean((itls < 0.001) & (sent_itls > 0.010)) < HELD_BACK
    # No more is added than the half of what would make it the time to the second token.
    ttft = np.median([record.ttft for record in run.records])
    assert ttft == pytest.approx(np.median(sent[:, 0] - arrived), abs=ITL / 2)


def what_happened(run: Run, log: Path) -> tuple[Floats, Floats]:
    """When the mock had each request, and when it sent each token: seconds of the run.

    Returns:
        [request] and [request, token], in the order of the schedule.
    """
    answers = [json.loads(line) for line in log.read_text().splitlines()]
    by_opening = {tuple(answer["opening"]): answer for answer in answers}
    assert len(by_opening) == len(answers)
    rules = run.schedule.prompts
    in_order = [
        by_opening[tuple(prompts.token_ids(request, index, rules)[:8])]
        for index, request in enumerate(run.schedule.requests)
    ]
    start = run.info["start_at"]
    arrived = np.array([answer["arrived"] for answer in in_order])
    return arrived - start, np.array([answer["sent"] for answer in in_order]) - start

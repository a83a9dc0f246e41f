"""What a report says of servers and clients with known faults, beside the truth.

The mock server logs when each token really left, and what it did to each request. The truth is
computed from that log and the schedule alone, by other code than the report's.
"""

import json
import math
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from loadtest.client.command import INVALID, client_command
from loadtest.errors import LoadTestError
from loadtest.report.intervals import Floats
from loadtest.report.summary import Summary, group_runs, summarize
from loadtest.runs.run import Run, load_run
from loadtest.traffic import prompts
from loadtest.traffic.generate import generate
from loadtest.traffic.scenario import Scenario
from loadtest.traffic.schedule import write_schedule
from vllm_gac.checkpoint.atomic_files import write_text

_RATE, _OUTPUT, _TTFT, _ITL = 20.0, 30, 0.1, 0.02
DRAIN = 4.0  # seconds
_FILES = 24  # so few that 20 requests a second of 0.7 s run out of them
_FROZEN, _EVERY = 0.09, 2.3  # seconds


@dataclass(frozen=True, slots=True)
class Trial:
    """One fault: what the server does to every `every`-th request, or what the client lacks."""

    name: str
    fault: str = "none"
    every: int = 1
    client: str = "healthy"


TRIALS = (
    Trial("none"),
    Trial("half refused", "refuse", 2),
    Trial("503 for one in 50", "busy", 50),
    Trial("one in 100 hung", "hang", 100),
    Trial("stalls in 2 %", "stall", 50),
    Trial("empty first event", "empty-first"),
    Trial("error: null", "null-error"),
    Trial("client out of files", client="few files"),
    Trial("client frozen", client="frozen"),
)


@dataclass(frozen=True, slots=True)
class Truth:
    """What the server knows, of the requests of the schedule; times in seconds."""

    failed: int
    goodput: float
    ttft_p50: float
    ttft_p99: float
    itl_p99: float
    gap_p99: float


def check_faults(out: Path, seconds: float, only: Sequence[str] = ()) -> Path:
    """Run all trials, or those named; write out/faults.md. Raises LoadTestError if one fails."""
    names = [trial.name for trial in TRIALS]
    if unknown := set(only) - set(names):
        raise LoadTestError(f"--only {sorted(unknown)[0]!r}: there are {', '.join(names)}")
    out.mkdir(parents=True, exist_ok=True)
    schedule = _schedule(out, seconds)
    table = [
        "| fault | verdict | failed | goodput, 1/s | TTFT p50, ms | TTFT p99, ms | ITL p99, ms "
        "| worst gap p99, ms |",
        "| --- | --- " + "| ---: " * 6 + "|",
    ]
    page = out / "faults.md"
    for trial in TRIALS:
        if not only or trial.name in only:
            run, truth = run_trial(trial, schedule, out / trial.name.replace(" ", "-"))
            table.append(_row(trial, run, truth))
            print(table[-1], flush=True)
            # Anew after each, so that a run that is cut short leaves what it has.
            write_text(page, "\n".join([*_heading(seconds), *table]) + "\n")
    return page


def _heading(seconds: float) -> list[str]:
    return [
        "# The load test against servers and clients with known faults",
        "",
        f"`python -m loadtest faults OUT --seconds {seconds:g}`: {_RATE:g} requests/s of {_OUTPUT} "
        f"tokens to a mock that answers after {_TTFT * 1e3:g} ms",
        f"and then every {_ITL * 1e3:g} ms, but for the fault. Each cell is what the report says / "
        "what the server's own log says.",
        "A request that failed took forever (∞). Where the client is at fault the run is INVALID, "
        "and its numbers are not used.",
        f"*client frozen*: stopped for {_FROZEN * 1e3:g} ms every {_EVERY:g} s. *client out of "
        f"files*: {_FILES} file descriptors.",
        "",
    ]


def run_trial(trial: Trial, schedule: Path, out: Path) -> tuple[Run, Truth]:
    """One run of the client against the mock. Raises LoadTestError if the client fails."""
    if out.exists():
        raise LoadTestError(f"{out}: exists already; name another directory")
    out.mkdir(parents=True)
    log = out / "sent.jsonl"
    mock = [sys.executable, "-m", "loadtest", "mock", "--port", "0", "--log", str(log)]
    mock += ["--ttft", str(_TTFT), "--itl", str(_ITL)]
    mock += ["--fault", trial.fault, "--every", str(trial.every)]
    with subprocess.Popen(mock, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            _client(trial, schedule, server.stdout.readline().strip(), out / "run")
        finally:
            server.terminate()
    run = load_run(out / "run")
    return run, true_numbers(run, log)


def true_numbers(run: Run, log: Path) -> Truth:
    """The truth from the server's log: what it never had, or failed on purpose, took forever."""
    ttft, itls, gaps, failed, good = [], [], [], 0, 0
    for request, sent in zip(run.schedule.requests, tokens_sent(run, log), strict=True):
        if len(sent) == 0:
            failed += 1
            ttft.append(math.inf)
            gaps.append(math.inf)
            itls += [math.inf] * (request.output_length - 1)
            continue
        apart = np.diff(sent)
        ttft.append(float(sent[0]) - request.timestamp / 1000)
        itls += apart.tolist()
        gaps.append(float(apart.max()))
        good += ttft[-1] <= 1.0 and float(apart.mean()) <= 0.05
    duration = run.schedule.traffic["scenario"]["duration"]
    return Truth(
        failed,
        good / duration,
        _percentile(ttft, 50),
        _percentile(ttft, 99),
        _percentile(itls, 99),
        _percentile(gaps, 99),
    )


def tokens_sent(run: Run, log: Path) -> Iterator[Floats]:
    """When each token left the mock server: [tokens] seconds of the run for each request.

    Empty for a request that the server never had, or failed on purpose.
    """
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    by_opening = {tuple(line["opening"]): line["sent"] for line in lines}
    for index, request in enumerate(run.schedule.requests):
        opening = tuple(prompts.token_ids(request, index, run.schedule.prompts)[:8])
        yield np.array(by_opening.get(opening, []), dtype=float) - run.info["start_at"]


def _schedule(out: Path, seconds: float) -> Path:
    scenario = Scenario.model_validate(
        {
            "name": "faults",
            "lengths": {"input": 32, "output": _OUTPUT},
            "rate": _RATE,
            "duration": seconds,
        }
    )
    path = out / "schedule.jsonl"
    write_schedule(generate(scenario), path)
    return path


def _client(trial: Trial, schedule: Path, url: str, out: Path) -> None:
    command = client_command(url, "mock", schedule, out, "--drain", str(DRAIN))
    few = trial.client == "few files"
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=_few_files if few else None,
    ) as client:
        done = threading.Event()
        freezer = threading.Thread(target=_freeze, args=(client.pid, done), daemon=True)
        if trial.client == "frozen":
            freezer.start()
        said, _ = client.communicate()
        done.set()
    if client.returncode not in (0, INVALID):
        raise LoadTestError(f"{trial.name}: locust exited with {client.returncode}: {said[-500:]}")


def _few_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (_FILES, _FILES))


def _freeze(process: int, done: threading.Event) -> None:
    try:
        while not done.wait(_EVERY - _FROZEN):
            os.kill(process, signal.SIGSTOP)
            done.wait(_FROZEN)
            os.kill(process, signal.SIGCONT)
    except ProcessLookupError:
        return


def _row(trial: Trial, run: Run, truth: Truth) -> str:
    said: Summary = summarize(group_runs([run])[0])
    verdict = "valid" if run.verdict.valid else f"INVALID: {'; '.join(run.verdict.reasons)}"
    pairs: list[tuple[float, float, str]] = [
        (said.failed, truth.failed, ""),
        (said.goodput.value, truth.goodput, ".2f"),
        (said.latency["ttft"][50.0].value * 1e3, truth.ttft_p50 * 1e3, ".1f"),
        (said.latency["ttft"][99.0].value * 1e3, truth.ttft_p99 * 1e3, ".1f"),
        (said.latency["itl"][99.0].value * 1e3, truth.itl_p99 * 1e3, ".1f"),
        (said.latency["gap"][99.0].value * 1e3, truth.gap_p99 * 1e3, ".1f"),
    ]
    cells = [
        f"{_describe(reported, form)} / {_describe(true, form)}" for reported, true, form in pairs
    ]
    return "| " + " | ".join([trial.name, verdict, *cells]) + " |"


def _describe(number: float, form: str) -> str:
    return "∞" if math.isinf(number) else format(number, form)


def _percentile(values: Sequence[float], percent: float) -> float:
    found: Any = np.percentile(values, percent, method="inverted_cdf")
    return float(found)

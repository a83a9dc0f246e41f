"""Writes runs of an imaginary server with known latencies, in the client's format."""

import json
from pathlib import Path
from typing import Any

from loadtest.runs.health import ProcessHealth, write_health
from loadtest.runs.records import Record, to_line
from loadtest.traffic.generate import generate
from loadtest.traffic.scenario import Scenario
from loadtest.traffic.schedule import Schedule, fingerprint, write_schedule


def scenario(**fields: Any) -> Scenario:
    """A scenario of prompts of 20 tokens and answers of 8."""
    usual = {"name": "imaginary", "lengths": {"input": 20, "output": 8}}
    return Scenario.model_validate(usual | fields)


def write_run(
    directory: Path,
    label: str = "dense",
    rate: float = 2.0,
    ttft: float = 0.2,
    itl: float = 0.02,
    lag: float = 0.001,
    fail_every: int = 0,
    cancelled_tokens: int | None = None,
    wake: float = 0.001,
    seed: int = 0,
    schedule: Schedule | None = None,
) -> Path:
    """A run of 120 s, or of `schedule`; request k takes (1 + k % 10 / 10) times the latencies.

    With `cancelled_tokens`, every fourth client hangs up after so many tokens.
    """
    slo = {"ttft": 0.5, "tpot": 0.05}
    schedule = schedule or generate(scenario(rate=rate, duration=120, seed=seed, slo=slo))
    directory.mkdir(parents=True)
    write_schedule(schedule, directory / "schedule.jsonl")
    lines = []
    for index, request in enumerate(schedule.requests):
        due, stretch = request.timestamp / 1000, 1 + index % 10 / 10
        record = Record(index, due, 20, 8, sent=due + lag, status=200)
        record.tokens = [due + stretch * (ttft + k * itl) for k in range(8)]
        record.ended = record.tokens[-1]
        record.prompt_tokens, record.completion_tokens = 20, 8
        if fail_every and index % fail_every == 0:
            record.tokens, record.error = [], "HTTP 503: <b>busy</b>"
        if cancelled_tokens is not None and index % 4 == 0:
            record.tokens, record.cancelled = record.tokens[:cancelled_tokens], True
            record.completion_tokens = record.prompt_tokens = None
        lines.append(to_line(record) + "\n")
    (directory / "records.0.jsonl").write_text("".join(lines))
    write_health(ProcessHealth(0, 0.3, 0.0001, wake, 2 * wake), directory / "health.0.json")
    info = {
        "label": label,
        "command": f"locust --label {label}",
        "start_at": 1.0,
        "processes": 1,
        "start": f"{label}-{seed}",
        "base_url": "http://127.0.0.1:8000",
        "model": "imaginary",
        "endpoint": "completions",
        "schedule_sha256": fingerprint(directory / "schedule.jsonl"),
        "server_version": "0.32.0",
        "versions": {"python": "3.11"},
        "hardware": {"cpu": "one", "memory": "1 GiB", "gpu": "none"},
    }
    (directory / "run.json").write_text(json.dumps(info))
    return directory


def write_starts(directory: Path, starts: int, label: str = "dense", **changes: Any) -> list[Path]:
    """Runs of a server that was started so often, each with a seed of its own."""
    return [
        write_run(directory / f"{label}-{seed}", label, seed=seed, **changes)
        for seed in range(starts)
    ]

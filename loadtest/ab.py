"""A/B runs: several servers in turn under the same schedules, in the order A B C C B A A B C ...

Alternating the order keeps what drifts (clocks, temperature, neighbours) from favouring one
server. Every turn is a fresh server, warmed up before it counts, and stopped afterwards, also on
Ctrl-C.
"""

import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from loadtest.errors import LoadTestError
from loadtest.report import ReportOptions, write_report
from loadtest.scenario import find_scenario, load_scenario
from loadtest.schedule import write_schedule
from loadtest.server import running_server
from loadtest.server_metrics import facts, gpu_memory_mib, scrape, write_facts
from loadtest.traffic import generate
from loadtest.yaml_file import load_yaml

_HERE = Path(__file__).parent
_INVALID = 3
# What the warm-up leaves in a prefix cache must not help the runs.
_WARMUP_SEED = 20_250_221
Label = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Server(_Strict):
    """One competitor: `command` starts it on port {port}, and it answers to `model`."""

    label: Label
    model: str
    command: str
    environment: dict[str, str] = Field(default_factory=dict)


class Comparison(_Strict):
    """An A/B file. `ideal` as in `report --ideal`; `warmup` seconds of traffic are not counted."""

    title: str
    scenario: str
    servers: Annotated[list[Server], Field(min_length=1, max_length=16)]
    baseline: str
    rates: Annotated[list[Rate], Field(min_length=1)]
    duration: Seconds | None = None
    repeats: Annotated[int, Field(strict=True, ge=1, le=100)] = 3
    warmup: Seconds = 10.0
    processes: Annotated[int, Field(strict=True, ge=1, le=64)] = 1
    port: Annotated[int, Field(strict=True, ge=1024, le=65535)] = 8100
    patience: Seconds = 900.0
    drain: Seconds = 120.0
    ideal: list[str] = Field(default_factory=list)


def load_comparison(path: Path) -> Comparison:
    """Read an A/B file; LoadTestError naming the file and every wrong field."""
    comparison = load_yaml(path, Comparison)
    labels = [server.label for server in comparison.servers]
    if len(set(labels)) < len(labels) or comparison.baseline not in labels:
        raise LoadTestError(f"{path}: labels must differ, and one must be the baseline's")
    return comparison


def run_comparison(comparison: Comparison, out: Path) -> Path:
    """Do all runs, each in a directory of its own below `out`, and write out/report.html.

    Raises LoadTestError if `out` has runs already, and if a server or a client fails.
    """
    if (out / "runs").exists():
        raise LoadTestError(f"{out}: holds runs already; name another directory")
    (out / "runs").mkdir(parents=True)
    schedules = [_schedule(comparison, rate, out) for rate in comparison.rates]
    warmup = _schedule(comparison, comparison.rates[0], out, comparison.warmup)
    runs: list[Path] = []
    for repeat in range(comparison.repeats):
        turns = comparison.servers if repeat % 2 == 0 else comparison.servers[::-1]
        for server in turns:
            runs += _turn(comparison, server, repeat, schedules, warmup, out)
    report = out / "report.html"
    options = ReportOptions(comparison.title, comparison.baseline, ideal=tuple(comparison.ideal))
    write_report(runs, report, options)
    return report


def _schedule(comparison: Comparison, rate: float, out: Path, warmup: float | None = None) -> Path:
    path = find_scenario(comparison.scenario)
    seed = None if warmup is None else _WARMUP_SEED
    scenario = load_scenario(path, rate=rate, duration=warmup or comparison.duration, seed=seed)
    name = f"{rate:g}-per-second" if warmup is None else "warmup"
    written = out / f"{name}.jsonl"
    write_schedule(generate(scenario), written)
    return written


def _turn(
    comparison: Comparison,
    server: Server,
    repeat: int,
    schedules: Sequence[Path],
    warmup: Path,
    out: Path,
) -> list[Path]:
    """One server's turn: start, warm up, one run per rate, stop."""
    base_url = f"http://127.0.0.1:{comparison.port}"
    command = shlex.split(server.command.replace("{port}", str(comparison.port)))
    name = f"{server.label}-{repeat + 1}"
    print(f"{name}: {shlex.join(command)}", flush=True)
    runs = []
    log = out / f"{name}.log"
    with running_server(command, server.environment, base_url, log, comparison.patience):
        _locust(comparison, server, base_url, warmup, out / "warmups" / name)
        for schedule in schedules:
            directory = out / "runs" / f"{name}-{schedule.stem}"
            before = scrape(base_url)
            _locust(comparison, server, base_url, schedule, directory)
            found = facts(before, scrape(base_url))
            if (memory := gpu_memory_mib()) is not None:
                found["gpu_memory_mib"] = memory
            write_facts(found, directory)
            runs.append(directory)
    return runs


def _locust(
    comparison: Comparison, server: Server, base_url: str, schedule: Path, directory: Path
) -> None:
    command = [
        *(sys.executable, "-m", "locust", "-f", str(_HERE / "locustfile.py")),
        *("--headless", "--only-summary", "--host", base_url, "--model", server.model),
        *("--label", server.label, "--schedule", str(schedule), "--out", str(directory)),
        *("--drain", str(comparison.drain)),
    ]
    if comparison.processes > 1:
        command += ["--processes", str(comparison.processes)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(f"  {schedule.stem}: {done.stdout.splitlines()[0] if done.stdout else ''}", flush=True)
    if done.returncode not in (0, _INVALID):
        tail = "\n".join(done.stderr.splitlines()[-15:])
        raise LoadTestError(f"locust exited with {done.returncode}: {tail}")

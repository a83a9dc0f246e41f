"""A/B runs: several servers take turns under the same schedules, in the order A B C C B A A B C ...

Conditions drift during a measurement: clocks, temperature, other users of the machine. The
alternating order keeps drift from favouring one server. In its turn a server climbs one staircase
of rates for each kind of traffic. Each turn starts a fresh server, warms it up before the
measurement, and stops it afterwards, also on Ctrl-C. With `together`, all servers are up at the
same time instead, each in its part of the GPU. Then only the server whose turn it is has work.
"""

import contextlib
import json
import shlex
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from loadtest.ab.server import running_server
from loadtest.ab.staircase import Step, split_into_runs, write_staircase
from loadtest.errors import LoadTestError
from loadtest.report.report import ReportOptions, write_report
from loadtest.runs.server_metrics import Metrics, facts, gpu_memory_mib, scrape, write_facts
from loadtest.traffic.generate import generate
from loadtest.traffic.scenario import find_scenario, load_scenario
from loadtest.traffic.schedule import write_schedule
from loadtest.yaml_file import load_yaml

_LOCUSTFILE = Path(__file__).parents[1] / "locustfile.py"
_INVALID = 3
# The warm-up has its own prompts, so that what it leaves in a prefix cache does not help the runs.
_WARMUP_SEED = 20_250_221
Label = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Server(_Strict):
    """One server to compare. `command` starts it on port {port}; `model` is its model's name."""

    label: Label
    model: str
    command: str
    environment: dict[str, str] = Field(default_factory=dict)


class Traffic(_Strict):
    """A scenario at ascending rates (requests per second), each for `duration` seconds."""

    scenario: str
    rates: Annotated[list[Rate], Field(min_length=1)]
    duration: Seconds


class Comparison(_Strict):
    """An A/B file. `ideal` is as in `report --ideal`. `warmup` seconds of traffic do not count."""

    title: str
    traffic: Annotated[list[Traffic], Field(min_length=1)]
    servers: Annotated[list[Server], Field(min_length=1, max_length=16)]
    baseline: str
    together: bool = False
    repeats: Annotated[int, Field(strict=True, ge=1, le=100)] = 3
    warmup: Seconds = 10.0
    processes: Annotated[int, Field(strict=True, ge=1, le=64)] = 1
    port: Annotated[int, Field(strict=True, ge=1024, le=65000)] = 8100
    patience: Seconds = 900.0
    drain: Seconds = 120.0
    ideal: list[str] = Field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Staircase:
    """One scenario of one repeat: the whole schedule, its steps, and the names of their runs."""

    name: str
    schedule: Path
    steps: tuple[Step, ...]
    names: tuple[str, ...]


def load_comparison(path: Path) -> Comparison:
    """Read an A/B file. Raises LoadTestError, which names the file and every wrong field."""
    comparison = load_yaml(path, Comparison)
    labels = [server.label for server in comparison.servers]
    if len(set(labels)) < len(labels) or comparison.baseline not in labels:
        raise LoadTestError(f"{path}: labels must differ, and one must be the baseline's")
    for traffic in comparison.traffic:
        if traffic.rates != sorted(set(traffic.rates)):
            raise LoadTestError(f"{path}: rates of {traffic.scenario} must ascend")
    return comparison


def run_comparison(comparison: Comparison, out: Path) -> Path:
    """Do all runs, each in its own directory below `out`, and write out/report.html.

    Raises LoadTestError if `out` has runs already, or if a server or a client fails.
    """
    if (out / "runs").exists():
        raise LoadTestError(f"{out}: holds runs already; name another directory")
    (out / "runs").mkdir(parents=True)
    repeats = [_staircases(comparison, repeat, out) for repeat in range(comparison.repeats)]
    warmup = _warmup(comparison, out)
    seconds = sum(traffic.duration * len(traffic.rates) for traffic in comparison.traffic)
    turns = comparison.repeats * len(comparison.servers)
    print(f"{turns} turns with {seconds:g} s of traffic each", flush=True)
    runs: list[Path] = []
    with contextlib.ExitStack() as all_of_them:
        if comparison.together:
            for server in comparison.servers:
                all_of_them.enter_context(_up(comparison, server, server.label, warmup, out))
        for repeat, staircases in enumerate(repeats):
            order = comparison.servers if repeat % 2 == 0 else comparison.servers[::-1]
            for server in order:
                name = f"{server.label}-{repeat + 1}"
                print(f"{name}:", flush=True)
                with contextlib.ExitStack() as its_own:
                    if not comparison.together:
                        its_own.enter_context(_up(comparison, server, name, warmup, out))
                    for staircase in staircases:
                        runs += _climb(comparison, server, name, staircase, out)
    report = out / "report.html"
    options = ReportOptions(comparison.title, comparison.baseline, ideal=tuple(comparison.ideal))
    write_report(runs, report, options)
    return report


def _staircases(comparison: Comparison, repeat: int, out: Path) -> list[_Staircase]:
    """The staircases of one repeat: one for each scenario.

    Every repeat has the same requests but other prompts, because a server may have cached those of
    the last repeat.
    """
    staircases = []
    for traffic in comparison.traffic:
        path = find_scenario(traffic.scenario)
        steps, names = [], []
        for number, rate in enumerate(traffic.rates):
            scenario = load_scenario(path, rate=rate, duration=traffic.duration)
            step = Step(out / f"{path.stem}-{rate:g}-per-second.jsonl", number * traffic.duration)
            write_schedule(generate(scenario), step.schedule)
            steps.append(step)
            names.append(step.schedule.stem)
        name = f"{path.stem}-{repeat + 1}"
        whole = out / f"{name}.jsonl"
        write_staircase(steps, zlib.crc32(name.encode()), whole)
        staircases.append(_Staircase(path.stem, whole, tuple(steps), tuple(names)))
    return staircases


def _warmup(comparison: Comparison, out: Path) -> Path:
    first = comparison.traffic[0]
    scenario = load_scenario(
        find_scenario(first.scenario),
        rate=first.rates[0],
        duration=comparison.warmup,
        seed=_WARMUP_SEED,
    )
    path = out / "warmup.jsonl"
    write_schedule(generate(scenario), path)
    return path


@contextlib.contextmanager
def _up(
    comparison: Comparison, server: Server, name: str, warmup: Path, out: Path
) -> Iterator[None]:
    """Start the server and warm it up. It runs until the block ends."""
    command = shlex.split(_command(comparison, server))
    print(f"starting {name}: {shlex.join(command)}", flush=True)
    url, log = _base_url(comparison, server), out / f"{name}.log"
    with running_server(command, server.environment, url, log, comparison.patience):
        _locust(comparison, server, warmup, out / "warmups" / name)
        yield


def _port(comparison: Comparison, server: Server) -> int:
    return comparison.port + (comparison.servers.index(server) if comparison.together else 0)


def _base_url(comparison: Comparison, server: Server) -> str:
    return f"http://127.0.0.1:{_port(comparison, server)}"


def _command(comparison: Comparison, server: Server) -> str:
    return server.command.replace("{port}", str(_port(comparison, server)))


def _climb(
    comparison: Comparison, server: Server, name: str, staircase: _Staircase, out: Path
) -> list[Path]:
    """Run one staircase in a server's turn. Returns the directories of its steps' runs."""
    directory = out / "staircases" / f"{name}-{staircase.name}"
    scraped: list[Metrics] = []
    begins = [step.begin for step in staircase.steps]
    url = _base_url(comparison, server)
    scraper = threading.Thread(
        target=_scrape_at, args=(url, directory, begins, scraped), daemon=True
    )
    scraper.start()
    _locust(comparison, server, staircase.schedule, directory)
    scraper.join()
    scraped.append(scrape(url))
    runs = [out / "runs" / f"{name}-{step}" for step in staircase.names]
    split_into_runs(directory, staircase.steps, runs, _command(comparison, server))
    for run, (before, after) in zip(runs, pairwise(scraped), strict=True):
        found = facts(before, after)
        # The memory of servers that are up together cannot be told apart.
        if not comparison.together and (memory := gpu_memory_mib()) is not None:
            found["gpu_memory_mib"] = memory
        write_facts(found, run)
    return runs


def _scrape_at(
    base_url: str, directory: Path, begins: Sequence[float], scraped: list[Metrics]
) -> None:
    """Scrape when each step begins. The client writes into run.json when the first step begins."""
    start = None
    give_up = time.monotonic() + 60
    while start is None and time.monotonic() < give_up:
        with contextlib.suppress(OSError, ValueError, KeyError):
            start = json.loads((directory / "run.json").read_text(encoding="utf-8"))["start_at"]
        time.sleep(0.1)
    for begin in begins:
        time.sleep(max((start or 0.0) + begin - time.time(), 0.0))
        scraped.append(scrape(base_url))


def _locust(comparison: Comparison, server: Server, schedule: Path, directory: Path) -> None:
    command = [
        *(sys.executable, "-m", "locust", "-f", str(_LOCUSTFILE)),
        *("--headless", "--only-summary", "--host", _base_url(comparison, server)),
        *("--model", server.model, "--label", server.label),
        *("--schedule", str(schedule), "--out", str(directory)),
        *("--drain", str(comparison.drain)),
    ]
    if comparison.processes > 1:
        command += ["--processes", str(comparison.processes)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(f"  {schedule.stem}: {done.stdout.splitlines()[0] if done.stdout else ''}", flush=True)
    if done.returncode not in (0, _INVALID):
        tail = "\n".join(done.stderr.splitlines()[-15:])
        raise LoadTestError(f"locust exited with {done.returncode}: {tail}")

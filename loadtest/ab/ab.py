"""A/B runs: several servers take turns under the same schedules, in the order ABC BCA CAB ...

Conditions drift during a measurement: clocks, temperature, other users of the machine. So each
server is first, second and third equally often. Each repeat has schedules of its own, which all
servers get: a result must not hang on one draw of lengths and arrivals. In its turn a server climbs
one staircase of rates for each kind of traffic. Each turn starts a fresh server, warms it up before
the measurement, and stops it afterwards, also on Ctrl-C. With `together`, all servers are up at the
same time instead, each in its part of the GPU. Then only the server whose turn it is has work, and
a turn is of one kind of traffic: a measurement that is cut short has compared what it has measured.
"""

import contextlib
import json
import os
import shlex
import socket
import subprocess
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from loadtest.ab.server import running_server, starting_server
from loadtest.ab.staircase import Step, split_into_runs, write_staircase
from loadtest.client.command import INVALID, client_command
from loadtest.errors import LoadTestError
from loadtest.report.capacity import Capacity, search
from loadtest.report.power import Need, read_needs
from loadtest.report.report import ReportOptions, refuse_twice, write_report
from loadtest.report.summary import traffic_of
from loadtest.runs.run import Run, load_run
from loadtest.runs.server_metrics import (
    Metrics,
    facts,
    gpu_joules,
    gpu_memory_mib,
    scrape,
    write_facts,
)
from loadtest.traffic.generate import generate
from loadtest.traffic.scenario import Scenario, find_scenario, load_scenario
from loadtest.traffic.schedule import fingerprint, write_schedule
from loadtest.yaml_file import load_yaml

# The warm-up has its own prompts, so that what it leaves in a prefix cache does not help the runs.
_WARMUP_SEED = 20_250_221
# What a client adds to the time of a staircase: its start and the last answers.
_CLIENT_SECONDS = 12.0
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
    gpus: Annotated[int, Field(strict=True, ge=1, le=1024)] = 1


class Search(_Strict):
    """In each turn, up to `steps` more rates, where they tell most about the server's capacity.

    It stops when the limits of the capacity are at most `within` from their middle.
    """

    steps: Annotated[int, Field(strict=True, ge=1, le=100)]
    within: Annotated[float, Field(gt=0, le=1)] = 0.05


class Traffic(_Strict):
    """A scenario at ascending rates (requests per second).

    Of each rate `duration` seconds count. Before them are `settle` seconds in which the server
    gets to the steady state of the rate, and after them `tail` seconds that keep it there.
    """

    scenario: str
    rates: Annotated[list[Rate], Field(min_length=1)]
    duration: Seconds
    settle: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 15.0
    tail: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 5.0
    search: Search | None = None

    @property
    def step(self) -> float:
        """Seconds of traffic at one rate."""
        return self.settle + self.duration + self.tail


class Comparison(_Strict):
    """An A/B file. `ideal` and `gpu_price` are as in `report`.

    `warmup` seconds of traffic go to each server when it has started, and do not count. With
    `at_once`, servers that are up together also start at the same time. vLLM's must then be told
    how large their caches are (--kv-cache-memory-bytes): each would else measure what the others
    take.
    """

    title: str
    traffic: Annotated[list[Traffic], Field(min_length=1)]
    servers: Annotated[list[Server], Field(min_length=1, max_length=16)]
    baseline: str
    together: bool = False
    at_once: bool = False
    repeats: Annotated[int, Field(strict=True, ge=1, le=100)] = 3
    warmup: Seconds = 10.0
    processes: Annotated[int, Field(strict=True, ge=1, le=64)] = 1
    port: Annotated[int, Field(strict=True, ge=1024, le=65000)] = 8100
    patience: Seconds = 900.0
    drain: Seconds = 120.0
    ideal: list[str] = Field(default_factory=list)
    gpu_price: Annotated[float, Field(gt=0)] | None = None


@dataclass(frozen=True, slots=True)
class Extent:
    """How much to run, beside what the comparison's file says.

    Attributes:
        until: repeat until TTFT and TPOT are known within this fraction at the file's rates, at
            least as often as the file says; None: exactly as often.
        minutes: start no repeat that would end later than this.
        part: which part of a measurement in parts this is. Each has schedules of its own.
        pool: directories of earlier parts, whose runs are in the report, too.
    """

    until: float | None = None
    minutes: float | None = None
    part: int = 1
    pool: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True)
class _Staircase:
    """One scenario of one repeat: the whole schedule, its steps, and the names of their runs."""

    name: str
    traffic: Traffic
    schedule: Path
    steps: tuple[Step, ...]
    names: tuple[str, ...]


def load_comparison(path: Path) -> Comparison:
    """Read an A/B file. Raises LoadTestError, which names the file and every wrong field."""
    comparison = load_yaml(path, Comparison)
    labels = [server.label for server in comparison.servers]
    if len(set(labels)) < len(labels) or comparison.baseline not in labels:
        raise LoadTestError(f"{path}: labels must differ, and one must be the baseline's")
    if comparison.at_once and not comparison.together:
        raise LoadTestError(f"{path}: at_once needs together: true, else one server runs at a time")
    for traffic in comparison.traffic:
        if traffic.rates != sorted(set(traffic.rates)):
            raise LoadTestError(f"{path}: rates of {traffic.scenario} must ascend")
    return comparison


def run_comparison(comparison: Comparison, out: Path, extent: Extent | None = None) -> Path:
    """Do all runs, each in its own directory below `out`, and write out/report.html.

    Raises LoadTestError if `out` has runs already, if a pooled part has the same schedules, or if
    a server or a client fails.
    """
    extent = extent or Extent()
    if (out / "runs").exists():
        raise LoadTestError(f"{out}: holds runs already; name another directory")
    earlier = [run for part in extent.pool for run in _runs_of(part)]
    refuse_twice(earlier)
    out.mkdir(parents=True, exist_ok=True)
    first = _staircases(comparison, extent.part, 1, out)
    _refuse_same_schedules(first, earlier, extent.part)
    (out / "runs").mkdir()
    warmup = _warmup(comparison, out)
    progress = _Progress(comparison, extent)
    report = out / "report.html"
    options = ReportOptions(
        comparison.title,
        comparison.baseline,
        ideal=tuple(comparison.ideal),
        gpu_price=comparison.gpu_price,
    )
    runs: list[Path] = []
    with contextlib.ExitStack() as all_of_them:
        if comparison.together:
            _start_all(comparison, warmup, out, all_of_them)
        for repeat in count(1):
            staircases = first if repeat == 1 else _staircases(comparison, extent.part, repeat, out)
            number = _number(extent.part, repeat)
            for server, climbed in _turns(comparison, staircases, extent.part + repeat - 2):
                name = f"{server.label}-{number}"
                progress.begin(name, climbed)
                with contextlib.ExitStack() as its_own:
                    if not comparison.together:
                        its_own.enter_context(_up(comparison, server, name, warmup, out))
                    for staircase in climbed:
                        runs += _climb(comparison, server, name, staircase, out)
                    for staircase in climbed:
                        before = [run for run in (*earlier, *runs) if _is_of(run, server)]
                        runs += _search(
                            comparison,
                            server,
                            name,
                            staircase.traffic,
                            before,
                            (extent.part, repeat),
                            out,
                        )
            if repeat < comparison.repeats:
                continue
            write_report([*earlier, *runs], report, options)
            missing = _missing(comparison, report, extent.until) if extent.until else []
            for need in missing:
                print(f"  {need}", flush=True)
            if not missing:
                break
            if not progress.has_time(repeat):
                print("stopped: no time for another repeat; what is missing is above", flush=True)
                break
    return report


def _turns(
    comparison: Comparison, staircases: Sequence[_Staircase], shift: int
) -> Iterator[tuple[Server, Sequence[_Staircase]]]:
    """Whose turn it is, one after another, with what staircases. `shift` is who begins."""
    # A server that starts anew for each turn climbs all of them in it.
    parts = [[staircase] for staircase in staircases] if comparison.together else [staircases]
    for number, part in enumerate(parts):
        turn = (shift + number) % len(comparison.servers)
        for server in (*comparison.servers[turn:], *comparison.servers[:turn]):
            yield server, part


def _refuse_same_schedules(
    staircases: Sequence[_Staircase], earlier: Sequence[Path], part: int
) -> None:
    """Refuse a part that would repeat an earlier one: what it adds would be no new draw."""
    mine = {fingerprint(step.schedule) for staircase in staircases for step in staircase.steps}
    for run in earlier:
        if json.loads((run / "run.json").read_text(encoding="utf-8"))["schedule_sha256"] in mine:
            raise LoadTestError(
                f"{run}: has the schedules of --part {part} already; give this part a number "
                "that no pooled part has"
            )


def _missing(comparison: Comparison, report: Path, within: float) -> list[Need]:
    """What is not known yet at the rates of the file. Those of a search get no second test."""
    fixed = {
        (_scenario_name(find_scenario(traffic.scenario)), rate)
        for traffic in comparison.traffic
        for rate in traffic.rates
    }
    found = read_needs(report.with_suffix(".json"), within)
    return [need for need in found if (need.traffic, need.rate) in fixed]


def _number(part: int, repeat: int) -> str:
    return str(repeat) if part == 1 else f"{part}.{repeat}"


def _runs_of(part: Path) -> list[Path]:
    found = sorted(path.parent for path in (part / "runs").glob("*/run.json"))
    if not found:
        raise LoadTestError(f"{part}: holds no runs of `ab` to pool")
    return found


def _is_of(run: Path, server: Server) -> bool:
    label = json.loads((run / "run.json").read_text(encoding="utf-8"))["label"]
    return bool(label == server.label)


class _Progress:
    """Says whose turn it is, and how much time is left."""

    def __init__(self, comparison: Comparison, extent: Extent) -> None:
        parts = len(comparison.traffic) if comparison.together else 1
        self._turns = comparison.repeats * len(comparison.servers) * parts
        self._more = extent.until is not None
        self._minutes = extent.minutes
        self._seconds = _traffic_seconds(comparison)
        self._start = time.monotonic()
        self._begun = 0
        self._done, self._current = 0.0, 0.0  # seconds of traffic
        print(f"{self._turns} turns with up to {self._seconds:g} s of traffic", flush=True)

    def begin(self, name: str, staircases: Sequence[_Staircase]) -> None:
        """A turn begins."""
        spent = time.monotonic() - self._start
        self._done += self._current
        self._current = sum(_seconds_of(staircase.traffic) for staircase in staircases)
        self._begun += 1
        # Before the first turn has ended, only the traffic's own time is known.
        slower = max(spent / self._done, 1.0) if self._done else 1.0
        left = max(self._seconds - self._done, self._current) * slower / 60
        least = "at least " if self._more else ""
        print(f"{name}: turn {self._begun} of {least}{self._turns}, ", end="")
        print(f"{', '.join(staircase.name for staircase in staircases)}, ", end="")
        print(f"{least}{left:.0f} min left", flush=True)

    def has_time(self, repeat: int) -> bool:
        """Whether another repeat would end in time."""
        spent = (time.monotonic() - self._start) / 60
        return self._minutes is None or spent * (repeat + 1) / repeat <= self._minutes


def prediction(comparison: Comparison) -> str:
    """What a comparison will run and how long that takes, one line for each kind of traffic."""
    servers, repeats = len(comparison.servers), comparison.repeats
    lines = []
    clients = 0
    for traffic in comparison.traffic:
        rates = ", ".join(f"{rate:g}" for rate in traffic.rates)
        more = f" and up to {traffic.search.steps} of a search" if traffic.search else ""
        seconds = servers * repeats * _seconds_of(traffic)
        clients += servers * repeats * (1 + (traffic.search.steps if traffic.search else 0))
        lines.append(
            f"{traffic.scenario} at {rates}/s{more}: {servers} servers x {repeats} repeats, "
            f"{seconds:g} s of traffic"
        )
    minutes = (_traffic_seconds(comparison) + clients * _CLIENT_SECONDS) / 60
    if comparison.at_once:
        starts = "one start of all servers at once"
    else:
        starts = f"{servers if comparison.together else servers * repeats} starts of a server"
    lines.append(f"about {minutes:.0f} min, and {starts} with {comparison.warmup:g} s of warm-up")
    return "\n".join(lines)


def _traffic_seconds(comparison: Comparison) -> float:
    """Seconds of traffic of all turns, at most."""
    turn = sum(_seconds_of(traffic) for traffic in comparison.traffic)
    return comparison.repeats * len(comparison.servers) * turn


def _seconds_of(traffic: Traffic) -> float:
    more = traffic.search.steps if traffic.search else 0
    return traffic.step * (len(traffic.rates) + more)


def _staircases(comparison: Comparison, part: int, repeat: int, out: Path) -> list[_Staircase]:
    """The staircases of one repeat: one for each scenario.

    Each repeat has lengths, arrivals and prompts of its own; all servers have the same.
    """
    staircases = []
    for traffic in comparison.traffic:
        path = find_scenario(traffic.scenario)
        steps = [
            _step(traffic, path, rate, number * traffic.step, (part, repeat), out)
            for number, rate in enumerate(traffic.rates)
        ]
        name = f"{path.stem}-{_number(part, repeat)}"
        whole = out / f"{name}.jsonl"
        write_staircase(steps, zlib.crc32(name.encode()), whole)
        names = tuple(f"{path.stem}-{rate:g}-per-second" for rate in traffic.rates)
        staircases.append(_Staircase(path.stem, traffic, whole, tuple(steps), names))
    return staircases


def _step(
    traffic: Traffic,
    path: Path,
    rate: float,
    begin: float,
    which: tuple[int, int],
    out: Path,
    suffix: str = "",
) -> Step:
    """Write the schedule of one rate of one repeat. `which` is the part and the repeat."""
    name = f"{path.stem}-{rate:g}-per-second-{_number(*which)}{suffix}"
    scenario = load_scenario(
        path, rate=rate, duration=traffic.step, seed=zlib.crc32(f"{name} traffic".encode())
    )
    file = out / f"{name}.jsonl"
    write_schedule(generate(scenario), file)
    return Step(file, begin, (traffic.settle, traffic.settle + traffic.duration))


def _search(
    comparison: Comparison,
    server: Server,
    name: str,
    traffic: Traffic,
    before: Sequence[Path],
    which: tuple[int, int],
    out: Path,
) -> list[Path]:
    """Test rates near the server's capacity until its limits are narrow. Returns the new runs."""
    if traffic.search is None:
        return []
    path = find_scenario(traffic.scenario)
    mine = [run for run in map(load_run, before) if traffic_of(run) == _scenario_name(path)]

    def test(known: Capacity, number: int) -> list[Run]:
        low, high, rate = known.rate.low, known.rate.high, known.next_rate
        print(f"  capacity of {server.label}: {low:.3g} to {high:.3g} requests/s", flush=True)
        label = f"search-{number + 1}"
        step = _step(traffic, path, rate, 0.0, which, out, f"-{label}")
        whole = out / f"{name}-{path.stem}-{label}.jsonl"
        write_staircase([step], zlib.crc32(whole.stem.encode()), whole)
        run = f"{path.stem}-{rate:g}-per-second-{label}"
        staircase = _Staircase(f"{path.stem}-{label}", traffic, whole, (step,), (run,))
        return [load_run(run) for run in _climb(comparison, server, name, staircase, out)]

    added = search(mine, traffic.search.steps, traffic.search.within, test)
    return [run.directory for run in added]


def _scenario_name(path: Path) -> str:
    scenario: Scenario = load_scenario(path)
    return scenario.name


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


def _start_all(
    comparison: Comparison, warmup: Path, out: Path, stack: contextlib.ExitStack
) -> None:
    """Start and warm up the servers that are up together. They run until `stack` is closed."""
    if not comparison.at_once:
        for server in comparison.servers:
            stack.enter_context(_up(comparison, server, server.label, warmup, out))
        return
    waits = [
        stack.enter_context(
            starting_server(*_start(comparison, server, server.label, out), comparison.patience)
        )
        for server in comparison.servers
    ]
    for wait in waits:
        wait()
    for server in comparison.servers:
        _locust(comparison, server, warmup, out / "warmups" / server.label)


@contextlib.contextmanager
def _up(
    comparison: Comparison, server: Server, name: str, warmup: Path, out: Path
) -> Iterator[None]:
    """Start the server and warm it up. It runs until the block ends."""
    with running_server(*_start(comparison, server, name, out), comparison.patience):
        _locust(comparison, server, warmup, out / "warmups" / name)
        yield


def _start(
    comparison: Comparison, server: Server, name: str, out: Path
) -> tuple[list[str], dict[str, str], str, Path]:
    """The server's command, environment, URL and log. Prints what is about to start."""
    command = shlex.split(_command(comparison, server))
    print(f"starting {name}: {shlex.join(command)}", flush=True)
    return command, server.environment, _base_url(comparison, server), out / f"{name}.log"


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
    scraped: list[_Reading] = []
    begins = [step.begin for step in staircase.steps]
    url, gpus = _base_url(comparison, server), _visible_gpus(server)
    scraper = threading.Thread(
        target=_scrape_at, args=(url, gpus, directory, begins, scraped), daemon=True
    )
    scraper.start()
    _locust(comparison, server, staircase.schedule, directory)
    scraper.join()
    scraped.append(_Reading.now(url, gpus))
    runs = [out / "runs" / f"{name}-{step}" for step in staircase.names]
    command = _command(comparison, server)
    split_into_runs(directory, staircase.steps, runs, command, server.gpus)
    for run, (before, after) in zip(runs, pairwise(scraped), strict=True):
        found = facts(before.metrics, after.metrics)
        if before.joules is not None and after.joules is not None:
            found["watts"] = (after.joules - before.joules) / (after.at - before.at)
        # The memory of servers that are up together cannot be told apart.
        if not comparison.together and (memory := gpu_memory_mib(gpus)) is not None:
            found["gpu_memory_mib"] = memory
        write_facts(found, run)
    return runs


@dataclass(frozen=True, slots=True)
class _Reading:
    """What a server and its GPUs say at a moment."""

    at: float
    metrics: Metrics
    joules: float | None

    @classmethod
    def now(cls, base_url: str, gpus: str | None) -> "_Reading":
        return cls(time.monotonic(), scrape(base_url), gpu_joules(gpus))


def _visible_gpus(server: Server) -> str | None:
    """The GPUs that the server may use, as CUDA_VISIBLE_DEVICES names them; None: all."""
    name = "CUDA_VISIBLE_DEVICES"
    return server.environment.get(name, os.environ.get(name))


def _scrape_at(
    base_url: str,
    gpus: str | None,
    directory: Path,
    begins: Sequence[float],
    scraped: list[_Reading],
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
        scraped.append(_Reading.now(base_url, gpus))


def _locust(comparison: Comparison, server: Server, schedule: Path, directory: Path) -> None:
    more = ["--label", server.label, "--drain", str(comparison.drain)]
    if comparison.processes > 1:
        # A port of its own: several comparisons may run at the same time, each on its own GPUs.
        port = str(_free_port())
        more += ["--processes", str(comparison.processes)]
        more += ["--master-bind-port", port, "--master-port", port]
    url = _base_url(comparison, server)
    command = client_command(url, server.model, schedule, directory, *more)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(f"  {schedule.stem}: {done.stdout.splitlines()[0] if done.stdout else ''}", flush=True)
    if done.returncode not in (0, INVALID):
        tail = "\n".join(done.stderr.splitlines()[-15:])
        raise LoadTestError(f"locust exited with {done.returncode}: {tail}")


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])

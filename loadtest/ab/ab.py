"""A/B runs: several servers take turns under the same schedules, in the order ABC BCA CAB ...

Conditions drift during a measurement: clocks, temperature, other users of the machine. So each
server is first, second and third equally often. Each repeat has schedules of its own, which all
servers get: a result must not hang on one draw of lengths and arrivals. In its turn a server climbs
one staircase of rates for each kind of traffic. Each turn starts a fresh server, warms it up before
the measurement, and stops it afterwards, also on Ctrl-C. With `together`, all servers are up at the
same time instead, each in its part of the GPU. Then only the server whose turn it is has work.
"""

import contextlib
import json
import shlex
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

from loadtest.ab.server import running_server
from loadtest.ab.staircase import Step, split_into_runs, write_staircase
from loadtest.client.command import INVALID, client_command
from loadtest.errors import LoadTestError
from loadtest.report.capacity import capacities
from loadtest.report.power import Need, read_needs
from loadtest.report.report import ReportOptions, refuse_twice, write_report
from loadtest.report.summary import group_runs, summarize
from loadtest.runs.run import load_run
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

    `warmup` seconds of traffic go to each server when it has started, and do not count.
    """

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
            for server in comparison.servers:
                all_of_them.enter_context(_up(comparison, server, server.label, warmup, out))
        for repeat in count(1):
            staircases = first if repeat == 1 else _staircases(comparison, extent.part, repeat, out)
            turn = (repeat - 1) % len(comparison.servers)
            for server in (*comparison.servers[turn:], *comparison.servers[:turn]):
                name = f"{server.label}-{_number(extent.part, repeat)}"
                progress.begin(name)
                with contextlib.ExitStack() as its_own:
                    if not comparison.together:
                        its_own.enter_context(_up(comparison, server, name, warmup, out))
                    for staircase in staircases:
                        runs += _climb(comparison, server, name, staircase, out)
                    for traffic in comparison.traffic:
                        before = [run for run in (*earlier, *runs) if _is_of(run, server)]
                        runs += _search(
                            comparison, server, name, traffic, before, (extent.part, repeat), out
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
        self._servers = len(comparison.servers)
        self._turns = comparison.repeats * self._servers
        self._more = extent.until is not None
        self._minutes = extent.minutes
        # Before the first turn has ended, only the traffic's own time is known.
        self._turn = sum(
            t.step * (len(t.rates) + (t.search.steps if t.search else 0))
            for t in comparison.traffic
        )
        self._start = time.monotonic()
        self._done = 0
        print(f"{self._turns} turns with up to {self._turn:g} s of traffic each", flush=True)

    def begin(self, name: str) -> None:
        """A turn begins."""
        spent = time.monotonic() - self._start
        turn = spent / self._done if self._done else self._turn
        left = max(self._turns - self._done, 1) * turn / 60
        least = "at least " if self._more else ""
        print(f"{name}: turn {self._done + 1} of {least}{self._turns}, ", end="")
        print(f"{least}{left:.0f} min left", flush=True)
        self._done += 1

    def has_time(self, repeat: int) -> bool:
        """Whether another repeat would end in time."""
        spent = (time.monotonic() - self._start) / 60
        return self._minutes is None or spent * (repeat + 1) / repeat <= self._minutes


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
        staircases.append(_Staircase(path.stem, whole, tuple(steps), names))
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
    path, found = find_scenario(traffic.scenario), list[Path]()
    if traffic.search is None:
        return found
    mine, loaded = _scenario_name(path), [load_run(run) for run in before]
    for number in range(traffic.search.steps):
        groups = group_runs(loaded)
        (known,) = [
            c
            for c in capacities(groups, [summarize(group) for group in groups])
            if c.traffic == mine
        ]
        low, high = known.rate.low, known.rate.high
        print(f"  capacity of {server.label}: {low:.3g} to {high:.3g} requests/s", flush=True)
        if known.narrow(traffic.search.within):
            break
        rate = known.next_rate
        step = _step(traffic, path, rate, 0.0, which, out, f"-search-{number + 1}")
        whole = out / f"{name}-{path.stem}-search-{number + 1}.jsonl"
        write_staircase([step], zlib.crc32(whole.stem.encode()), whole)
        again = f"{path.stem}-{rate:g}-per-second-search-{number + 1}"
        staircase = _Staircase(f"{path.stem}-search-{number + 1}", whole, (step,), (again,))
        new = _climb(comparison, server, name, staircase, out)
        loaded += map(load_run, new)
        found += new
    return found


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
    scraped: list[_Reading] = []
    begins = [step.begin for step in staircase.steps]
    url = _base_url(comparison, server)
    scraper = threading.Thread(
        target=_scrape_at, args=(url, directory, begins, scraped), daemon=True
    )
    scraper.start()
    _locust(comparison, server, staircase.schedule, directory)
    scraper.join()
    scraped.append(_Reading.now(url))
    runs = [out / "runs" / f"{name}-{step}" for step in staircase.names]
    command = _command(comparison, server)
    split_into_runs(directory, staircase.steps, runs, command, server.gpus)
    for run, (before, after) in zip(runs, pairwise(scraped), strict=True):
        found = facts(before.metrics, after.metrics)
        if before.joules is not None and after.joules is not None:
            found["watts"] = (after.joules - before.joules) / (after.at - before.at)
        # The memory of servers that are up together cannot be told apart.
        if not comparison.together and (memory := gpu_memory_mib()) is not None:
            found["gpu_memory_mib"] = memory
        write_facts(found, run)
    return runs


@dataclass(frozen=True, slots=True)
class _Reading:
    """What a server and the machine's GPUs say at a moment."""

    at: float
    metrics: Metrics
    joules: float | None

    @classmethod
    def now(cls, base_url: str) -> "_Reading":
        return cls(time.monotonic(), scrape(base_url), gpu_joules())


def _scrape_at(
    base_url: str, directory: Path, begins: Sequence[float], scraped: list[_Reading]
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
        scraped.append(_Reading.now(base_url))


def _locust(comparison: Comparison, server: Server, schedule: Path, directory: Path) -> None:
    more = ["--label", server.label, "--drain", str(comparison.drain)]
    if comparison.processes > 1:
        more += ["--processes", str(comparison.processes)]
    url = _base_url(comparison, server)
    command = client_command(url, server.model, schedule, directory, *more)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(f"  {schedule.stem}: {done.stdout.splitlines()[0] if done.stdout else ''}", flush=True)
    if done.returncode not in (0, INVALID):
        tail = "\n".join(done.stderr.splitlines()[-15:])
        raise LoadTestError(f"locust exited with {done.returncode}: {tail}")

"""A/B runs: several servers take turns under the same schedules, in the order ABC BCA CAB ...

Conditions drift during a measurement: clocks, temperature, other users of the machine. So each
server is first, second and third equally often. Each repeat has schedules of its own, which all
servers get: a result must not hang on one draw of lengths and arrivals. In its turn a server climbs
one staircase of rates for each kind of traffic. Each turn starts a fresh server, warms it up before
the measurement, and stops it afterwards, however the measurement ends. Ctrl-C writes the report of
what there is.
"""

import contextlib
import dataclasses
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from loadtest.ab.comparison_file import Comparison, Server, Traffic
from loadtest.ab.measure import Staircase, climb, up
from loadtest.ab.progress import Progress
from loadtest.ab.server import Running
from loadtest.ab.staircase import Step, write_staircase
from loadtest.ab.turns import Turns
from loadtest.errors import LoadTestError
from loadtest.report.capacity import Capacity, search
from loadtest.report.report import ReportOptions, write_report
from loadtest.report.summary import traffic_of
from loadtest.runs.run import Run, load_run, read_info
from loadtest.traffic.schedule import write_schedule

# The warm-up has its own prompts, so that what it leaves in a prefix cache does not help the runs.
_WARMUP_SEED = 20_250_221


def run_comparison(
    comparison: Comparison,
    out: Path,
    part: int = 1,
    gate: Mapping[str, Any] = MappingProxyType({}),
) -> Path:
    """Do all runs, each in its own directory below `out`, and write out/report.html.

    What `out` has of the same comparison already is not measured again.

    Args:
        comparison: what to run.
        out: directory for it.
        part: which part of a measurement in parts this is. Each has schedules of its own.
        gate: further options of the report, by name.

    Raises LoadTestError if `out` has runs of another comparison, or if a server or a client fails.
    """
    with contextlib.closing(Turns(comparison, part, out)) as turns:
        seed = f"stopped {turns.stopped} times" if turns.stopped else ""
        (out / "runs").mkdir(exist_ok=True)
        warmup = _warmup(comparison, out)
        progress = Progress(comparison)
        report = out / "report.html"
        try:
            _measure(comparison, out, part, warmup, progress, turns, seed)
        except (KeyboardInterrupt, LoadTestError):
            if found := _complete(out):
                _report(comparison, found, report, gate)
                print(f"stopped; what there is: {report}", flush=True)
            print("to go on: the same command again", flush=True)
            raise
    _report(comparison, _complete(out), report, gate)
    return report


def _measure(
    comparison: Comparison,
    out: Path,
    part: int,
    warmup: Path,
    progress: Progress,
    turns: Turns,
    seed: str,
) -> None:
    runs: list[Path] = []
    traffics = comparison.traffic
    for repeat in range(1, comparison.repeats + 1):
        staircases = _staircases(comparison, part, repeat, out, seed)
        number = _number(part, repeat)
        for server in _in_turn(comparison, part + repeat - 2):
            name = f"{server.label}-{number}"
            if (done := turns.done(name)) is not None:
                progress.skip(name)
                runs += done
                continue
            progress.begin(name)
            mine: list[Path] = []
            with up(comparison, server, name, warmup, out) as running:
                for staircase in staircases:
                    mine += _climb(comparison, server, running, name, staircase, out)
                for traffic in traffics:
                    before = [run for run in (*runs, *mine) if _is_of(run, server)]
                    which = (part, repeat)
                    mine += _search(comparison, server, running, name, traffic, before, which, out)
            turns.end(name, mine)
            runs += mine


def _in_turn(comparison: Comparison, shift: int) -> list[Server]:
    """Whose turn it is, one after another. `shift` is who begins."""
    turn = shift % len(comparison.servers)
    return [*comparison.servers[turn:], *comparison.servers[:turn]]


def _climb(
    comparison: Comparison,
    server: Server,
    running: Running,
    name: str,
    staircase: Staircase,
    out: Path,
) -> list[Path]:
    """The runs of a staircase. Steps whose client did not keep up are repeated once.

    They have the same lengths and arrivals, so that they compare with other servers' runs, but
    other prompts: the first ones may be in the prefix cache.
    """
    runs = climb(comparison, server, running, name, staircase, out)
    bad = [number for number, run in enumerate(runs) if not load_run(run).verdict.valid]
    if not bad:
        return runs
    print("  the client did not keep up: once more", flush=True)
    whole = out / f"{name}-{staircase.name}-again.jsonl"
    steps = tuple(
        dataclasses.replace(staircase.steps[number], begin=place * staircase.traffic.step)
        for place, number in enumerate(bad)
    )
    write_staircase(steps, zlib.crc32(whole.stem.encode()), whole)
    names = tuple(f"{staircase.names[number]}-again" for number in bad)
    again = Staircase(
        f"{staircase.name}-again", staircase.traffic, whole, steps, names, staircase.search
    )
    return [*runs, *climb(comparison, server, running, name, again, out)]


def _number(part: int, repeat: int) -> str:
    return str(repeat) if part == 1 else f"{part}.{repeat}"


def _report(
    comparison: Comparison, runs: Sequence[Path], out: Path, gate: Mapping[str, Any]
) -> None:
    """Write the report, without what is of servers that have no run yet."""
    labels = {read_info(run)["label"] for run in runs}
    against = comparison.baseline if comparison.baseline in labels else None
    options = ReportOptions(comparison.title, against, gpu_price=comparison.gpu_price, **gate)
    write_report(runs, out, options)


def _complete(part: Path) -> list[Path]:
    """The complete runs of a part, in the order in which they began. run.json is written last."""
    found = [path.parent for path in (part / "runs").glob("*/run.json")]
    return sorted(found, key=lambda run: (float(read_info(run)["start_at"]), run))


def _is_of(run: Path, server: Server) -> bool:
    label = read_info(run)["label"]
    return bool(label == server.label)


def _staircases(
    comparison: Comparison, part: int, repeat: int, out: Path, seed: str = ""
) -> list[Staircase]:
    """The staircases of one repeat: one for each scenario.

    Each repeat has lengths, arrivals and prompts of its own; all servers have the same. `seed`
    changes the prompts alone.
    """
    staircases = []
    for traffic in comparison.traffic:
        steps = [
            _step(traffic, rate, number * traffic.step, (part, repeat), out)
            for number, rate in enumerate(traffic.rates)
        ]
        name = f"{traffic.name}-{_number(part, repeat)}"
        whole = out / f"{name}.jsonl"
        write_staircase(steps, zlib.crc32(f"{name}{seed}".encode()), whole)
        names = tuple(f"{traffic.name}-{rate:g}-per-second" for rate in traffic.rates)
        staircases.append(Staircase(traffic.name, traffic, whole, tuple(steps), names))
    return staircases


def _step(
    traffic: Traffic,
    rate: float,
    begin: float,
    which: tuple[int, int],
    out: Path,
    suffix: str = "",
) -> Step:
    """Write the schedule of one rate of one repeat. `which` is the part and the repeat."""
    name = f"{traffic.name}-{rate:g}-per-second-{_number(*which)}{suffix}"
    file = out / f"{name}.jsonl"
    seed = zlib.crc32(f"{name} traffic".encode())
    write_schedule(traffic.schedule(rate, traffic.step, seed), file)
    return Step(file, begin, (traffic.settle, traffic.settle + traffic.duration))


def _search(
    comparison: Comparison,
    server: Server,
    running: Running,
    name: str,
    traffic: Traffic,
    before: Sequence[Path],
    which: tuple[int, int],
    out: Path,
) -> list[Path]:
    """Test rates near the server's capacity until its limits are narrow. Returns the new runs."""
    if traffic.search is None:
        return []
    mine = [run for run in map(load_run, before) if traffic_of(run) == traffic.name]
    mine = [run for run in mine if run.verdict.valid]
    made: list[Path] = []

    def test(known: Capacity, number: int) -> list[Run]:
        low, high, rate = known.rate.low, known.rate.high, known.next_rate
        print(f"  capacity of {server.label}: {low:.3g} to {high:.3g} requests/s", flush=True)
        label = f"search-{number + 1}"
        step = _step(traffic, rate, 0.0, which, out, f"-{label}")
        whole = out / f"{name}-{traffic.name}-{label}.jsonl"
        write_staircase([step], zlib.crc32(whole.stem.encode()), whole)
        run = f"{traffic.name}-{rate:g}-per-second-{label}"
        staircase = Staircase(f"{traffic.name}-{label}", traffic, whole, (step,), (run,), True)
        climbed = _climb(comparison, server, running, name, staircase, out)
        made.extend(climbed)
        return [run for run in map(load_run, climbed) if run.verdict.valid]

    search(mine, traffic.search.steps, traffic.search.within, test)
    return made


def _warmup(comparison: Comparison, out: Path) -> Path:
    first = comparison.traffic[0]
    schedule = first.schedule(first.rates[0], comparison.warmup, _WARMUP_SEED)
    requests = tuple(request.model_copy(update={"body": {}}) for request in schedule.requests)
    path = out / "warmup.jsonl"
    write_schedule(dataclasses.replace(schedule, requests=requests), path)
    return path

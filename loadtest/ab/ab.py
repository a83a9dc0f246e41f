"""A/B runs: several servers take turns under the same schedules, in the order ABC BCA CAB ...

Conditions drift: clocks, temperature, other users of the machine. So each server is first, second
and third equally often. Side by side, the turns of a repeat are at the same time, as far as there
are GPUs, each on its own, and the order says who has which. Each repeat has schedules of its own,
which all servers get. Each turn starts a fresh server, warms it up, lets it climb one staircase of
rates for each kind of traffic, and stops it, however the measurement ends. Ctrl-C writes the report
of what there is.
"""

import contextlib
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from loadtest.ab.comparison_file import Comparison, Traffic
from loadtest.ab.measure import Staircase, Turn, climb, up
from loadtest.ab.progress import Progress
from loadtest.ab.rounds import rounds
from loadtest.ab.server import Running
from loadtest.ab.staircase import Step, write_staircase
from loadtest.ab.turns import Turns
from loadtest.errors import LoadTestError
from loadtest.report.capacity import capacities
from loadtest.report.report import ReportOptions, write_report
from loadtest.report.summary import group_runs, traffic_of
from loadtest.runs.run import load_run, read_info
from loadtest.traffic.schedule import write_schedule

# The warm-up has its own prompts, so that what it leaves in a prefix cache does not help the runs.
_WARMUP_SEED = 20_250_221


def run_comparison(comparison: Comparison, out: Path, part: int = 1, **gate: Any) -> Path:
    """Do all runs, each in its own directory below `out`, and write out/report.html.

    What `out` has of the same comparison already is not measured again.

    `part` says which part of a measurement in parts this is; each has schedules of its own. `gate`
    has further options of the report, by name.

    Raises LoadTestError if `out` has runs of another comparison, or if a server or a client fails.
    """
    with contextlib.closing(Turns(comparison, part, out)) as turns:
        seed = f"stopped {turns.stopped} times" if turns.stopped else ""
        (out / "runs").mkdir(exist_ok=True)
        warmup = _warmup(comparison, out)
        report = out / "report.html"
        try:
            _measure(comparison, out, part, warmup, turns, seed)
        except (KeyboardInterrupt, SystemExit, LoadTestError):
            if runs := _complete(out):
                _report(comparison, runs, report, gate)
                print(f"stopped; what there is: {report}", flush=True)
            print("to go on: the same command again", flush=True)
            raise
    _report(comparison, _complete(out), report, gate)
    return report


def _measure(
    comparison: Comparison, out: Path, part: int, warmup: Path, turns: Turns, seed: str
) -> None:
    runs: list[Path] = []
    progress = Progress(comparison)
    for repeat in range(1, comparison.repeats + 1):
        number = str(repeat) if part == 1 else f"{part}.{repeat}"
        staircases = _staircases(comparison, number, out, seed)
        for servers in rounds(comparison, part + repeat - 2):
            together = [
                Turn(comparison, server, number, out, place, gpus)
                for place, (server, gpus) in enumerate(servers)
            ]
            waiting = [turn for turn in together if turns.done(turn.name) is None]
            progress.begin([turn.name for turn in together], [turn.name for turn in waiting])
            _at_once(
                [partial(_take, turn, warmup, staircases, tuple(runs), turns) for turn in waiting]
            )
            runs += [run for turn in together for run in turns.done(turn.name) or ()]


def _take(
    turn: Turn,
    warmup: Path,
    staircases: Sequence[Staircase],
    before: Sequence[Path],
    turns: Turns,
) -> None:
    """Do a turn. `before` are the runs of the turns before it, of all servers."""
    known = [run for run in before if read_info(run)["label"] == turn.server.label]
    with up(turn, warmup) as running:
        mine = [run for staircase in staircases for run in _climb(turn, running, staircase)]
        for traffic in turn.comparison.traffic:
            mine += _search(turn, running, traffic, [*known, *mine])
    turns.end(turn.name, mine)


def _at_once(what: Sequence[Callable[[], None]]) -> None:
    """Do all at the same time. Raises the first error when the others have ended, too."""
    if len(what) == 1:
        what[0]()
        return
    errors: list[Exception] = []

    def guarded(one: Callable[[], None]) -> None:
        try:
            one()
        except Exception as error:
            errors.append(error)

    # Ctrl-C reaches this thread alone. The others end with the process, and their servers with it.
    threads = [threading.Thread(target=guarded, args=(one,), daemon=True) for one in what]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def _climb(turn: Turn, running: Running, staircase: Staircase) -> list[Path]:
    """The runs of a staircase. Steps whose client did not keep up are repeated once.

    They have the same lengths and arrivals, so that they compare with other servers' runs, but
    other prompts: the first ones may be in the prefix cache.
    """
    runs = climb(turn, running, staircase)
    both = zip(staircase.steps, runs, strict=True)
    bad = [step for step, run in both if not load_run(run).verdict.valid]
    if not bad:
        return runs
    print(f"  {turn.name}: the client did not keep up: once more", flush=True)
    whole = turn.out / f"{turn.name}-{staircase.name}-again.jsonl"
    steps = tuple(
        replace(step, name=f"{step.name}-again", begin=place * staircase.traffic.step)
        for place, step in enumerate(bad)
    )
    write_staircase(steps, zlib.crc32(whole.stem.encode()), whole)
    again = replace(staircase, name=f"{staircase.name}-again", schedule=whole, steps=steps)
    return [*runs, *climb(turn, running, again)]


def _report(
    comparison: Comparison, runs: Sequence[Path], out: Path, gate: Mapping[str, Any]
) -> None:
    """Write the report, without what is of servers that have no run yet."""
    labels = {read_info(run)["label"] for run in runs}
    against = comparison.baseline if comparison.baseline in labels else None
    options = ReportOptions(comparison.title, against, **gate)
    write_report(runs, out, options)


def _complete(part: Path) -> list[Path]:
    """The complete runs of a part, in the order in which they began. run.json is written last."""
    runs = [path.parent for path in (part / "runs").glob("*/run.json")]
    return sorted(runs, key=lambda run: (float(read_info(run)["start_at"]), run))


def _staircases(comparison: Comparison, number: str, out: Path, seed: str = "") -> list[Staircase]:
    """The staircases of the repeat `number`: one for each scenario.

    Each repeat has lengths, arrivals and prompts of its own; all servers have the same. `seed`
    changes the prompts alone.
    """
    staircases = []
    for traffic in comparison.traffic:
        steps = tuple(
            _step(traffic, rate, place * traffic.step, number, out)
            for place, rate in enumerate(traffic.rates)
        )
        name = f"{traffic.name}-{number}"
        whole = out / f"{name}.jsonl"
        write_staircase(steps, zlib.crc32(f"{name}{seed}".encode()), whole)
        staircases.append(Staircase(traffic.name, traffic, whole, steps))
    return staircases


def _step(traffic: Traffic, rate: float, begin: float, number: str, out: Path) -> Step:
    """Write the schedule of one rate of the repeat `number`."""
    name = f"{traffic.name}-{rate:g}-per-second"
    file = out / f"{name}-{number}.jsonl"
    seed = zlib.crc32(f"{file.stem} traffic".encode())
    window = (traffic.settle, traffic.settle + traffic.duration)
    write_schedule(traffic.schedule(rate, traffic.step, seed, window), file)
    return Step(name, file, begin, window)


def _search(turn: Turn, running: Running, traffic: Traffic, before: Sequence[Path]) -> list[Path]:
    """Test rates near the server's capacity until its limits are narrow. Returns the new runs."""
    if traffic.search is None:
        return []
    mine = [run for run in map(load_run, before) if traffic_of(run) == traffic.name]
    mine = [run for run in mine if run.verdict.valid]
    most, made = traffic.most, list[Path]()
    for place in range(traffic.search.steps if mine else 0):
        (known,) = capacities(group_runs(mine))
        if known.half_width <= traffic.search.within:
            break
        low, high, rate = known.rate.low, known.rate.high, min(known.next_rate, most)
        print(f"  capacity of {turn.server.label}: {low:.3g} to {high:.3g} requests/s", flush=True)
        if rate < known.next_rate and rate <= known.tested[-1]:
            print(f"  {traffic.name} has no more than {rate:.4g} requests/s for a step", flush=True)
            break
        label = f"search-{place + 1}"
        step = _step(traffic, rate, 0.0, f"{turn.number}-{label}", turn.out)
        whole = turn.out / f"{turn.name}-{traffic.name}-{label}.jsonl"
        write_staircase([step], zlib.crc32(whole.stem.encode()), whole)
        steps = (replace(step, name=f"{step.name}-{label}"),)
        staircase = Staircase(f"{traffic.name}-{label}", traffic, whole, steps, search=True)
        climbed = _climb(turn, running, staircase)
        made += climbed
        mine += [run for run in map(load_run, climbed) if run.verdict.valid]
    return made


def _warmup(comparison: Comparison, out: Path) -> Path:
    first = comparison.traffic[0]
    schedule = first.schedule(first.rates[0], comparison.warmup, _WARMUP_SEED)
    requests = tuple(request.model_copy(update={"body": {}}) for request in schedule.requests)
    path = out / "warmup.jsonl"
    write_schedule(replace(schedule, requests=requests), path)
    return path

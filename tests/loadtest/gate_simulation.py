"""How often `--fail-on worse` is red, by simulation of servers whose true ratio is known.

    python -m tests.loadtest.gate_simulation [EXPERIMENTS]

prints the table of loadtest/README.md. Each start has a minute of 4 requests a second, and both
servers have the same. Starts of one server differ by 1 % (standard deviation), requests by 5 %
beside what both servers share, and one start in five has a stall of a second or so.
"""

import sys
from functools import cache
from pathlib import Path

import numpy as np

from loadtest.report.comparison import compare
from loadtest.report.gate import worse
from loadtest.report.intervals import Floats
from loadtest.report.summary import group_runs
from loadtest.runs.records import Record
from loadtest.runs.run import Run
from loadtest.runs.verdict import Verdict
from loadtest.traffic.generate import generate
from loadtest.traffic.scenario import Scenario
from loadtest.traffic.schedule import Schedule

MARGINS = (None, 0.05, 0.10)
_TOKENS = 20
_TIMES = {
    "as fast": 1.0,
    **{f"{percent} % slower": 1 + percent / 100 for percent in (3, 5, 10, 20)},
    "10 % faster": 1 / 1.1,
}


def red(times: float, starts: int, seed: int) -> list[bool]:
    """Whether the gate is red at each margin, where a server takes `times` as long.

    A verdict of as many starts as there are is accepted (`--these-starts`).
    """
    rng = np.random.default_rng([seed, starts, round(1000 * times)])
    runs = []
    for number in range(starts):
        schedule = _schedule(100 * seed + number)
        shared = rng.normal(0, 0.3, len(schedule.requests)), rng.normal(0, 0.1)
        for label, slower in (("dense", 1.0), ("other", times)):
            runs.append(_run(label, f"{label}-{number}", schedule, shared, slower, rng))
    groups = group_runs(runs)
    comparisons = compare(groups, "dense")
    return [bool(worse(runs, groups, comparisons, "dense", m, True)) for m in MARGINS]


@cache
def _schedule(seed: int) -> Schedule:
    lengths = {"input": 20, "output": _TOKENS}
    about = {"name": "drawn", "lengths": lengths, "rate": 4, "duration": 60, "seed": seed}
    return generate(Scenario.model_validate(about))


def _run(
    label: str,
    start: str,
    schedule: Schedule,
    shared: tuple[Floats, float],
    slower: float,
    rng: np.random.Generator,
) -> Run:
    count = len(schedule.requests)
    # First tokens and later ones: what starts differ in, and what requests do.
    first, later = (slower * np.exp(rng.normal(0, 0.01) + rng.normal(0, 0.05, count)) for _ in "ab")
    ttft, tpot = 0.2 * first * np.exp(shared[0]), 0.02 * later * np.exp(shared[1])
    for stall in rng.integers(0, count, rng.poisson(0.2)):
        ttft[stall : stall + 4] += rng.exponential(1.0)
    records = []
    for index, request in enumerate(schedule.requests):
        due = request.timestamp / 1000
        tokens = (due + ttft[index] + tpot[index] * np.arange(_TOKENS)).tolist()
        record = Record(index, due, 20, _TOKENS, due, tokens, tokens[-1], 200, 20, _TOKENS)
        records.append(record)
    info = {"label": label, "start": start, "schedule_sha256": str(id(schedule))}
    verdict = Verdict((), 0.0)
    return Run(Path(start), info, schedule, records, [], verdict, {})


def table(experiments: int) -> str:
    """The share of red gates in percent, as Markdown."""
    lines = [
        "| in truth | starts | no margin | `--margin 5%` | `--margin 10%` |",
        "| --- " * 5 + "|",
    ]
    for name, slower in _TIMES.items():
        for count in (2, 3, 5):
            shares = np.mean([red(slower, count, seed) for seed in range(experiments)], axis=0)
            lines.append(f"| {name} | {count} | " + " | ".join(f"{x:.0%}" for x in shares) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    wanted = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    print(table(wanted))

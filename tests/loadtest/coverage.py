"""How often the intervals of a report cover the truth, by simulation.

Many experiments are simulated, each with schedules of its own, and go through the same code as a
real report. The truth is that of the same servers over hours. A 95 % interval should cover it in
95 % of the experiments.

    python -m tests.loadtest.coverage RATE EXPERIMENTS [--sessions]

prints a row for each number of a report, of experiments of four windows of 120 s.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from loadtest.report.comparison import compare
from loadtest.report.intervals import Estimate
from loadtest.report.summary import MEASURES, PERCENTS, group_runs, summarize
from loadtest.runs.run import Run
from loadtest.traffic.scenario import Scenario
from tests.loadtest.simulator import Speed, simulated_run

SERVERS = {"dense": Speed(), "gac": Speed().times(0.8)}
WARMUP, COOLDOWN = 30.0, 5.0
_TRUE_RUNS = 1_000_000  # seeds of the runs that the truth is computed from
_TRUE_PARTS = 3  # of the truth; each is in memory as a whole


@dataclass(frozen=True, slots=True)
class Plan:
    """What one experiment does: `repeats` windows of `seconds` at `rate` requests per second.

    With `sessions`, these are the turns of conversations, which wait for the answers before them.
    """

    rate: float
    repeats: int
    seconds: float
    sessions: bool = False


@dataclass(slots=True)
class Tally:
    """How often an interval covered the truth, and how wide it was."""

    truth: float
    covered: int = 0
    experiments: int = 0
    widths: list[float] = field(default_factory=list)

    def add(self, estimate: Estimate) -> None:
        """Count one experiment."""
        self.experiments += 1
        self.covered += estimate.low <= self.truth <= estimate.high
        self.widths.append(estimate.relative)

    @property
    def share(self) -> float:
        """The share of experiments whose interval covered the truth."""
        return self.covered / self.experiments

    @property
    def half_width(self) -> float:
        """The median half width of the intervals, as a fraction of the value."""
        return float(np.median(self.widths))


def coverage(plan: Plan, experiments: int, true_seconds: float) -> dict[str, Tally]:
    """Simulate `experiments` experiments. By the name of each number that a report prints."""
    parts = [_truth(plan, part, true_seconds) for part in range(_TRUE_PARTS)]
    tallies = {name: Tally(float(np.mean([part[name] for part in parts]))) for name in parts[0]}
    for number in range(experiments):
        for name, estimate in _experiment(plan, number):
            tallies[name].add(estimate)
    return tallies


def _truth(plan: Plan, part: int, seconds: float) -> dict[str, float]:
    """What a report would print of `seconds` of simulated time, others for each part."""
    runs = 10
    seeds = [_TRUE_RUNS + part * runs + i for i in range(runs)]
    return {name: found.value for name, found in _numbers(plan, seeds, seconds / runs)}


def _experiment(plan: Plan, number: int) -> list[tuple[str, Estimate]]:
    seeds = range(1 + number * plan.repeats, 1 + (number + 1) * plan.repeats)
    return list(_numbers(plan, seeds, plan.seconds))


def _numbers(plan: Plan, seeds: Sequence[int], seconds: float) -> Iterator[tuple[str, Estimate]]:
    runs = [
        _run(speed, label, plan, seed, seconds)
        for label, speed in SERVERS.items()
        for seed in seeds
    ]
    groups = group_runs(runs)
    summary = summarize(groups[0])
    for measure in MEASURES:
        for percent in PERCENTS:
            yield f"{measure} p{percent:g}", summary.latency[measure][percent]
    yield "within SLO", summary.good_fraction
    yield "goodput", summary.goodput
    yield "good tokens/s", summary.good_tokens_per_second
    yield "answers/s", summary.requests_per_second
    yield "output tokens/s", summary.output_tokens_per_second
    (versus,) = compare(groups, "dense", {})
    for measure in MEASURES:
        for percent in PERCENTS:
            yield f"speedup {measure} p{percent:g}", versus.speedup[measure][percent]


def _run(speed: Speed, label: str, plan: Plan, seed: int, seconds: float) -> Run:
    # Until as many sessions end as begin, there are fewer requests.
    warmup = 3 * WARMUP if plan.sessions else WARMUP
    scenario = Scenario.model_validate(
        {
            "name": "coverage",
            "lengths": "azure-conversation",
            "arrivals": "azure-conversation",
            "scale": {"output": 0.2},
            "rate": plan.rate,
            "duration": warmup + seconds + COOLDOWN,
            "seed": seed,
            "max_model_len": 8192,
            "sessions": {"turns": 6, "think": 2, "message": 100} if plan.sessions else None,
        }
    )
    return simulated_run(scenario, speed, label, (warmup, warmup + seconds))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rate", type=float, help="requests per second")
    parser.add_argument("experiments", type=int)
    parser.add_argument("--sessions", action="store_true", help="requests are turns of sessions")
    options = parser.parse_args()
    plan = Plan(options.rate, 4, 120.0, options.sessions)
    for name, tally in coverage(plan, options.experiments, 6 * 3600.0).items():
        width = f"±{tally.half_width:.1%}" if np.isfinite(tally.half_width) else "open"
        print(f"| {name} | {tally.share:.1%}, {width} |", flush=True)

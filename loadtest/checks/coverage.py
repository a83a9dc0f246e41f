"""How often the intervals of a report cover the truth, by simulation.

Many experiments are simulated, each with schedules of its own, and go through the same code as a
real report. The truth is that of the same servers over hours. A 95 % interval should cover it in
95 % of the experiments.
"""

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from loadtest.checks.simulator import Speed, simulated_run
from loadtest.report.capacity import GOOD_ENOUGH, Capacity, capacities, search
from loadtest.report.comparison import compare
from loadtest.report.intervals import Estimate
from loadtest.report.summary import MEASURES, PERCENTS, group_runs, summarize
from loadtest.runs.run import Run
from loadtest.traffic.scenario import Scenario

SERVERS = {"dense": Speed(), "gac": Speed().times(0.8)}
WARMUP, COOLDOWN = 30.0, 5.0
# `map`, or that of a pool of processes.
Map = Callable[[Callable[[int], Any], Iterable[int]], Iterable[Any]]
_TRUE_RUNS = 1_000_000  # seeds of the runs that the truth is computed from
TRUE_PARTS = 3  # of the truth; each is in memory as a whole


@dataclass(frozen=True, slots=True)
class Plan:
    """What one experiment does: `repeats` windows of `seconds` at `rate` requests per second."""

    rate: float
    repeats: int
    seconds: float


@dataclass(slots=True)
class Tally:
    """How often an interval covered the truth, and how wide it was."""

    truth: float
    covered: int = 0
    experiments: int = 0
    open_ended: int = 0
    widths: list[float] = field(default_factory=list)

    def add(self, estimate: Estimate) -> None:
        """Count one experiment."""
        self.experiments += 1
        self.covered += estimate.low <= self.truth <= estimate.high
        self.open_ended += math.isinf(estimate.high)
        self.widths.append(estimate.relative)

    @property
    def share(self) -> float:
        """The share of experiments whose interval covered the truth."""
        return self.covered / self.experiments

    @property
    def half_width(self) -> float:
        """The median half width of the intervals, as a fraction of the value."""
        return float(np.median(self.widths))


def coverage(
    plan: Plan, experiments: int, true_seconds: float = 20_000.0, each: Map = map
) -> dict[str, Tally]:
    """Simulate `experiments` experiments. By the name of each number that a report prints."""
    tallies = true_numbers([true_values(plan, i, true_seconds) for i in range(TRUE_PARTS)])
    count(plan, range(experiments), tallies, each)
    return tallies


def true_values(plan: Plan, part: int, seconds: float = 20_000.0) -> dict[str, float]:
    """What a report would print of `seconds` of simulated time, others for each part."""
    runs = 10
    seeds = [_TRUE_RUNS + part * runs + i for i in range(runs)]
    return {name: found.value for name, found in _numbers(plan, seeds, seconds / runs)}


def true_numbers(parts: Sequence[dict[str, float]]) -> dict[str, Tally]:
    """The mean of what parts of the truth say, without experiments yet.

    Near saturation, 99th percentiles of single parts still differ by as much as half the standard
    error of an experiment.
    """
    return {name: Tally(float(np.mean([part[name] for part in parts]))) for name in parts[0]}


def count(plan: Plan, numbers: range, tallies: dict[str, Tally], each: Map = map) -> None:
    """Simulate the experiments with these numbers and count them in `tallies`."""
    for found in each(functools.partial(_experiment, plan), numbers):
        for name, estimate in found:
            tallies[name].add(estimate)


def _experiment(plan: Plan, number: int) -> list[tuple[str, Estimate]]:
    seeds = range(1 + number * plan.repeats, 1 + (number + 1) * plan.repeats)
    return list(_numbers(plan, seeds, plan.seconds))


@dataclass(frozen=True, slots=True)
class Search:
    """A search as in `ab`: `rates` first, then up to `steps` more, each `seconds` long."""

    rates: tuple[float, ...]
    seconds: float
    steps: int
    within: float = 0.1


def count_capacities(design: Search, numbers: range, tally: Tally, each: Map = map) -> None:
    """Find the capacity of the first server in the experiments with these numbers."""
    for estimate in each(functools.partial(_searched, design), numbers):
        tally.add(estimate)


def _searched(design: Search, number: int) -> Estimate:
    label, speed = next(iter(SERVERS.items()))
    seed, fixed = 1 + number * 1000, len(design.rates)
    runs = [
        _run(speed, label, rate, seed + i, design.seconds) for i, rate in enumerate(design.rates)
    ]

    def test(known: Capacity, number: int) -> list[Run]:
        return [_run(speed, label, known.next_rate, seed + fixed + number, design.seconds)]

    runs += search(runs, design.steps, design.within, test)
    groups = group_runs(runs)
    (found,) = capacities(groups, [summarize(group) for group in groups])
    return found.rate


def true_capacity(seconds: float = 6000.0) -> Tally:
    """The rate at which 99 % are good over hours, by bisection, without experiments yet."""
    label, speed = next(iter(SERVERS.items()))
    low, high = 1.0, 64.0
    while high / low > 1.01:
        middle = math.sqrt(low * high)
        runs = [_run(speed, label, middle, _TRUE_RUNS + i, seconds / 2) for i in range(2)]
        good = summarize(group_runs(runs)[0]).good_fraction.value
        low, high = (middle, high) if good >= GOOD_ENOUGH else (low, middle)
    return Tally(math.sqrt(low * high))


def _numbers(plan: Plan, seeds: Sequence[int], seconds: float) -> Iterator[tuple[str, Estimate]]:
    runs = [
        _run(speed, label, plan.rate, seed, seconds)
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


def _run(speed: Speed, label: str, rate: float, seed: int, seconds: float) -> Run:
    scenario = Scenario.model_validate(
        {
            "name": "coverage",
            "lengths": "azure-conversation",
            "arrivals": "azure-conversation",
            "scale": {"output": 0.2},
            "rate": rate,
            "duration": WARMUP + seconds + COOLDOWN,
            "seed": seed,
            "max_model_len": 8192,
        }
    )
    return simulated_run(scenario, speed, label, (WARMUP, WARMUP + seconds))

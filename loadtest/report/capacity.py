"""Capacity: the highest rate at which a server answers 99 % of the requests within the SLO.

The share of bad requests grows with the rate, and each tested rate has an interval of it. So the
capacity is above every rate that is surely good (at most 1 % bad, by its upper limit) and below
every rate that is surely bad. Nothing is assumed of the rates between two tested ones; a search
tests there. The limits hold with at least 95 %. 57 of 57 good requests prove no rate: 99 % takes
some 370 without a failure, more where failures come in clusters.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import isotonic_regression

from loadtest.report.intervals import Estimate, Floats
from loadtest.report.summary import PooledRuns, Summary, group_runs, summarize
from loadtest.runs.run import Run

GOOD_ENOUGH = 0.99


@dataclass(frozen=True, slots=True)
class Capacity:
    """What one server can take, in requests per second.

    `rate.low` is 0 if no tested rate is low enough to be sure, and `rate.high` is inf if none is
    high enough. `rate.value` is NaN if the tested rates do not enclose it.
    """

    label: str
    traffic: str
    rate: Estimate
    tested: tuple[float, ...]

    @property
    def next_rate(self) -> float:
        """The rate of which a test tells most.

        Beyond what was tested if no rate is surely bad, or if too many failed at the lowest one.
        If too few requests tell of the rates that seem good, one of these: the highest, because it
        has the most. Else between the best guess and the limit that is further from it: at the best
        guess itself a test would take longest to tell.
        """
        low, high, guess = self.rate.low, self.rate.high, self.rate.value
        if math.isinf(high):
            return _round(self.tested[-1] * 1.5)
        if low == 0 and math.isnan(guess):
            return _round(self.tested[0] / 1.5)
        if low == 0:
            return _round(max(guess / 1.25, self.tested[0]))
        if math.isnan(guess):
            guess = math.sqrt(low * high)
        below = guess / low >= high / guess
        return _round(math.sqrt(low * guess) if below else math.sqrt(guess * high))

    def narrow(self, within: float) -> bool:
        """Whether the limits are at most `within` from the middle, as a fraction."""
        low, high = self.rate.low, self.rate.high
        return low > 0 and math.isfinite(high) and math.sqrt(high / low) - 1 <= within


def capacities(groups: Sequence[PooledRuns], summaries: Sequence[Summary]) -> list[Capacity]:
    """The capacity of each server for each kind of traffic."""
    tested: dict[tuple[str, str], list[tuple[float, Estimate, int]]] = {}
    for group, summary in zip(groups, summaries, strict=True):
        row = (group.rate, summary.good_fraction, summary.requests)
        tested.setdefault((group.label, group.traffic), []).append(row)
    return [
        Capacity(label, traffic, capacity(sorted(rows)), tuple(rate for rate, _, _ in sorted(rows)))
        for (label, traffic), rows in tested.items()
    ]


def search(
    runs: Sequence[Run],
    steps: int,
    within: float,
    test: Callable[[Capacity, int], Sequence[Run]],
) -> list[Run]:
    """Test rates until the limits of a capacity are at most `within` from their middle.

    Args:
        runs: those of one server under one kind of traffic so far.
        steps: how many rates to test at most.
        within: as in `Capacity.narrow`.
        test: what tests `next_rate` of the capacity known so far; it gets the number of the test,
            from 0.

    Returns:
        The runs that were added.
    """
    added: list[Run] = []
    for number in range(steps):
        groups = group_runs([*runs, *added])
        (known,) = capacities(groups, [summarize(group) for group in groups])
        if known.narrow(within):
            break
        added += test(known, number)
    return added


def capacity(rows: Sequence[tuple[float, Estimate, int]]) -> Estimate:
    """The capacity from (rate, share of good requests, number of requests), by ascending rate."""
    good = [rate for rate, share, _ in rows if share.low >= GOOD_ENOUGH]
    bad = [rate for rate, share, _ in rows if share.high < GOOD_ENOUGH]
    low, high = sorted((max(good, default=0.0), min(bad, default=math.inf)))
    # Isotonic regression (Barlow et al., 1972): the closest shares that never fall with the rate.
    shares = isotonic_regression(
        [1 - share.value for _, share, _ in rows], weights=[count for _, _, count in rows]
    ).x
    guess = _crossing(np.log([rate for rate, _, _ in rows]), shares)
    # NaN stays NaN.
    return Estimate(min(max(guess, low), high), low, high)


def _crossing(rates: Floats, bad: Floats) -> float:
    """The rate at which `bad`, which never falls, passes 1 %; NaN if it does so nowhere between."""
    allowed = 1 - GOOD_ENOUGH
    if bad[0] > allowed or bad[-1] <= allowed:
        return math.nan
    after = int(np.argmax(bad > allowed))
    part = (allowed - bad[after - 1]) / (bad[after] - bad[after - 1])
    return float(math.exp(rates[after - 1] + part * (rates[after] - rates[after - 1])))


def _round(rate: float) -> float:
    return float(f"{rate:.3g}")

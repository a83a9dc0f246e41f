"""Capacity: the highest rate at which a server answers 99 % of the requests within the SLO.

The share of bad requests does not fall with the rate. So what was answered at a rate or above tells
of that rate, too: if of all these requests at most 1 % were bad, by the upper limit of the share,
the rate is surely good. In the same way a rate is surely bad if of all requests at it or below more
than 1 % were. The limits hold with at least 95 %. 99 % takes some 540 requests without a failure
in 8 blocks, 370 in very many and thousands in fewer than four, and more where failures come in
clusters: what a search tested at several rates adds up.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import isotonic_regression

from loadtest.report.intervals import Estimate, Floats, Samples, proportion
from loadtest.report.summary import PooledRuns

GOOD_ENOUGH = 0.99
# Simulated: nearer to the capacity, a missing limit takes many more requests than it is worth.
_ASIDE = 1.25


@dataclass(frozen=True, slots=True)
class AtRate:
    """One tested rate.

    Attributes:
        rate: requests per second.
        kept_slo: 1.0 for each request that kept the SLO, 0.0 for the others.
        blocks: how many blocks of time there are.
    """

    rate: float
    kept_slo: Samples
    blocks: int


@dataclass(frozen=True, slots=True)
class Capacity:
    """What one server can take, in requests per second.

    Attributes:
        rate: `low` is 0 if no tested rate is surely good, and `high` is inf if none is surely bad.
            `value` is NaN if the tested rates do not enclose it.
        tested: the rates, ascending.
        seems: the highest rate that seems good, 0 if none does, and the lowest one that seems bad,
            inf if none does.
    """

    label: str
    traffic: str
    rate: Estimate
    tested: tuple[float, ...]
    seems: tuple[float, float]

    @property
    def half_width(self) -> float:
        """How far the limits are from their middle, as a fraction; inf if one is missing."""
        low, high = self.rate.low, self.rate.high
        return math.sqrt(high / low) - 1 if low > 0 else math.inf

    @property
    def next_rate(self) -> float:
        """The rate of which a test tells most.

        Beyond what was tested if all rates seem good, or all bad. While a limit is missing, between
        what seems good and what seems bad, and when these are close, on the side where it is
        missing. Else between the best guess and the limit that is further from it: at the best
        guess itself a test would take longest to tell.
        """
        good, bad = self.seems
        low, high, guess = self.rate.low, self.rate.high, self.rate.value
        if math.isinf(bad):
            return _round(self.tested[-1] * 1.5)
        if good == 0:
            return _round(self.tested[0] / 1.5)
        if low > 0 and math.isfinite(high):
            below = guess / low >= high / guess
            return _round(math.sqrt(low * guess) if below else math.sqrt(guess * high))
        if bad / good > _ASIDE:
            return _round(math.sqrt(good * bad))
        return _round(bad * _ASIDE if math.isinf(high) else good / _ASIDE)


def capacities(groups: Sequence[PooledRuns]) -> list[Capacity]:
    """The capacity of each server for each kind of traffic."""
    rows: dict[tuple[str, str], list[AtRate]] = {}
    for group in groups:
        row = AtRate(group.rate, group.kept_slo, group.blocks)
        rows.setdefault((group.label, group.traffic), []).append(row)
    return [capacity(label, traffic, rates) for (label, traffic), rates in rows.items()]


def capacity(label: str, traffic: str, rows: Sequence[AtRate]) -> Capacity:
    """The capacity of one server, from what was tested."""
    rates = sorted({row.rate for row in rows})
    rows = [_together([row for row in rows if row.rate == rate]) for rate in rates]
    # Isotonic regression (Barlow et al., 1972): the closest shares that never fall with the rate.
    shares = isotonic_regression(
        [1 - float(row.kept_slo.values.mean()) for row in rows],
        weights=[len(row.kept_slo.values) for row in rows],
    ).x
    count = int(np.sum(shares <= 1 - GOOD_ENOUGH + 1e-12))  # that seem good
    seems = (rates[count - 1] if count else 0.0, rates[count] if count < len(rows) else math.inf)
    good = [
        row.rate
        for number, row in enumerate(rows)
        if any(_share(part).low >= GOOD_ENOUGH for part in ([row], rows[number:count]) if part)
    ]
    bad = [
        row.rate
        for number, row in enumerate(rows)
        if any(
            _share(part).high < GOOD_ENOUGH for part in ([row], rows[count : number + 1]) if part
        )
    ]
    low, high = sorted((max(good, default=0.0), min(bad, default=math.inf)))
    guess = _crossing(np.log(rates), shares)
    # NaN stays NaN.
    rate = Estimate(min(max(guess, low), high), low, high)
    return Capacity(label, traffic, rate, tuple(rates), seems)


def _together(rows: Sequence[AtRate]) -> AtRate:
    """All requests of these tests, as if at the rate of the first one."""
    before = np.cumsum([0, *(row.blocks for row in rows)])
    values = np.concatenate([row.kept_slo.values for row in rows])
    numbers = [row.kept_slo.blocks + first for row, first in zip(rows, before, strict=False)]
    kept_slo = Samples(values, np.concatenate(numbers))
    return AtRate(rows[0].rate, kept_slo, int(before[-1]))


def _share(rows: Sequence[AtRate]) -> Estimate:
    """The share of requests at all these rates that kept the SLO."""
    one = _together(rows)
    return proportion(one.kept_slo, one.blocks)


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

"""Percentiles, proportions, rates and ratios of latencies, with 95 % confidence intervals.

Two starts of one server differ, so the start is the unit of chance: each has a number of its own,
and what they have in common has Student's interval of the logarithms. Two servers under the same
schedules are compared start by start, so that what their traffic shares by chance cancels.

The interval of one start is of that start alone, and the unit is a *block* of time longer than the
server's memory, as requests of the same seconds share a queue and a batch. A ratio has that of a
jackknife, which leaves out one block at a time, a proportion that of Korn and Graubard (1998):
Clopper and Pearson's, with the number of requests divided by how much more blocks differ than
independent requests would. A percentile has Woodruff's (1952): those at both ends of its level's.

An interval has no end where the data sets no limit: with one unit, or where some units and not all
have an infinite percentile, as where requests failed.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import special

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
_TAIL = 0.025


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number and its 95 % confidence interval.

    `low` or `high` is 0, -inf or inf where the data sets no limit, and NaN without any data.
    """

    value: float
    low: float
    high: float

    def over(self, number: float) -> "Estimate":
        """This divided by `number`, which is known exactly."""
        return Estimate(self.value / number, self.low / number, self.high / number)

    @property
    def relative(self) -> float:
        """Half of the interval's width, as a fraction of the value; inf if there is no limit."""
        if not math.isfinite(self.value) or self.value == 0:
            return math.inf
        half = (self.high - self.low) / 2 / abs(self.value)
        return half if math.isfinite(half) else math.inf


NOTHING = Estimate(math.nan, math.nan, math.nan)


@dataclass(frozen=True, slots=True)
class Samples:
    """Values of one measure, infinite for a request that failed, each with its block's number."""

    values: Floats
    blocks: Ints


def percentile(
    samples: Samples, percent: float, blocks: int, starts: Ints | None = None
) -> Estimate:
    """The smallest value that at least `percent` % of the samples do not exceed.

    `starts` [blocks] numbers the start of the server that each block is of; None: all are of one.
    """
    count = len(samples.values)
    if not count:
        return NOTHING
    samples = ascending(samples)
    value = _at(samples.values, percent / 100)
    if starts is not None and starts.max() > 0:
        of_starts = Samples(samples.values, starts[samples.blocks])
        return _of_logarithms([_logarithms(of_starts, percent, starts)], value)
    inside = samples.values <= value
    below, above = _limits(inside, samples.blocks, percent / 100, blocks)
    # Beyond the highest level there is no value: the next one may be anything.
    high = _at(samples.values, above) if above <= count / (count + 1) else math.inf
    return Estimate(value, min(_at(samples.values, below), value), max(high, value))


def proportion(samples: Samples, blocks: int) -> Estimate:
    """The share of samples that are 1 rather than 0."""
    if not len(samples.values):
        return NOTHING
    share = float(samples.values.mean())
    return Estimate(share, *_limits(samples.values == 1, samples.blocks, share, blocks))


def rate(amounts: Floats, seconds: Floats, starts: Ints | None = None) -> Estimate:
    """The mean amount per second of blocks of `seconds` [blocks], by Student's interval.

    Amounts are never negative, and neither is the lower limit. `starts` is as in `percentile`.
    """
    mean = float(amounts.sum() / seconds.sum())
    if starts is not None and starts.max() > 0:
        amounts, seconds = (
            np.bincount(starts, of_blocks).astype(np.float64) for of_blocks in (amounts, seconds)
        )
    if len(amounts) < 2 or math.isnan(mean):
        return Estimate(mean, math.nan, math.nan)
    each = amounts / seconds
    half = _t(len(each) - 1) * float(each.std(ddof=1)) / math.sqrt(len(each))
    return Estimate(mean, max(mean - half, 0.0), mean + half)


def ratio(
    base: Samples,
    other: Samples,
    percent: float,
    units: tuple[Ints, Ints],
    paired: bool,
    by_start: bool,
) -> Estimate:
    """The percentile of `base` divided by that of `other`.

    Args:
        base: the numerator's samples.
        other: the denominator's.
        percent: which percentile.
        units: [blocks] of both, the unit of chance that each block is of; -1: of none, left out.
        paired: whether unit i of both had the same schedules.
        by_start: whether units are starts, whose ratios have a mean, or blocks of one start, whose
            requests count together.
    """
    kept = [_of_units(*given) for given in zip((base, other), units, strict=True)]
    if by_start:
        one, two = (
            _logarithms(samples, percent, n) for samples, n in zip(kept, units, strict=True)
        )
        return _quotient(one, two, paired, None)
    if not all(len(samples.values) for samples in kept):
        return NOTHING
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        one, two = (np.log(_at(samples.values, percent / 100)) for samples in kept)
        value = float(np.exp(one - two))
    if not 0 < value < math.inf or min(int(numbers.max()) for numbers in units) < 1:
        return Estimate(value, 0.0, math.inf)
    each = [_pseudovalues(samples, percent, n) for samples, n in zip(kept, units, strict=True)]
    return _quotient(each[0], each[1], paired, value)


def ratio_of_totals(
    top: tuple[Floats, Floats],
    bottom: tuple[Floats, Floats],
    units: tuple[Ints, Ints],
    paired: bool,
) -> Estimate:
    """The amount for each of something in `top` divided by that in `bottom`.

    `top` and `bottom` are the amounts and what they are of, [blocks] each; the rest is as in
    `ratio`.
    """
    logs = []
    for (amounts, of), numbers in zip((top, bottom), units, strict=True):
        kept = numbers >= 0
        each = [np.bincount(numbers[kept], values[kept]) for values in (amounts, of)]
        with np.errstate(divide="ignore", invalid="ignore"):
            logs.append(np.log(each[0] / each[1]))
    return _quotient(logs[0], logs[1], paired, None)


def ascending(samples: Samples) -> Samples:
    """The same samples in ascending order, so that each percentile need not sort them again."""
    if bool(np.all(samples.values[:-1] <= samples.values[1:])):
        return samples
    order = np.argsort(samples.values, kind="stable")
    return Samples(samples.values[order], samples.blocks[order])


def _quotient(one: Floats, two: Floats, paired: bool, value: float | None) -> Estimate:
    if not paired:
        return _of_logarithms([one, -two], value)
    with np.errstate(invalid="ignore"):
        # Where both took forever, or one has no request, nothing is compared.
        return _of_logarithms([one - two], value)


def _of_logarithms(parts: Sequence[Floats], value: float | None) -> Estimate:
    """What has as its logarithm the sum of the means of independent parts, [units] each.

    `value` is what the estimate is of, if not of that mean. NaN is a unit without a request.
    """
    parts = [part[~np.isnan(part)] for part in parts]
    if not all(map(len, parts)):
        return NOTHING
    with np.errstate(invalid="ignore", over="ignore"):
        mean = float(np.exp(sum(part.mean() for part in parts)))
    value = mean if value is None else value
    unlimited = Estimate(value, 0.0, math.inf)
    if not all(np.isfinite(part).all() for part in parts):
        # Sure where all units say so: each start of one server took forever, and none of the other.
        sure = all(
            np.isfinite(part).all() or (len(part) > 1 and (part == part[0]).all()) for part in parts
        )
        return Estimate(value, value, value) if sure and value == mean else unlimited
    if min(map(len, parts)) < 2:
        return unlimited
    # Welch's interval, or Student's of one part.
    variances = [float(part.var(ddof=1)) / len(part) for part in parts]
    if (variance := sum(variances)) < 1e-24:
        return Estimate(value, value, value)
    freedom = variance**2 / sum(
        v**2 / (len(part) - 1) for v, part in zip(variances, parts, strict=True)
    )
    factor = math.exp(min(_t(freedom) * math.sqrt(variance), 700.0))
    return Estimate(value, value / factor, value * factor)


def _of_units(samples: Samples, units: Ints) -> Samples:
    """The samples in ascending order, each with its unit's number; those of none are left out."""
    samples = ascending(samples)
    numbers = units[samples.blocks]
    return Samples(samples.values[numbers >= 0], numbers[numbers >= 0])


def _logarithms(samples: Samples, percent: float, units: Ints) -> Floats:
    """[units], the logarithm of the percentile of each; NaN without a request."""
    logs = np.full(int(units.max()) + 1, math.nan)
    with np.errstate(divide="ignore"):
        for unit in np.unique(samples.blocks):
            logs[unit] = np.log(_at(samples.values[samples.blocks == unit], percent / 100))
    return logs


def _pseudovalues(samples: Samples, percent: float, units: Ints) -> Floats:
    """[units], what each adds to the percentile's logarithm, by leaving it out (a jackknife)."""
    count = int(units.max()) + 1
    left = np.full(count, math.nan)
    for unit in range(count):
        others = samples.values[samples.blocks != unit]
        if len(others):
            with np.errstate(divide="ignore"):
                left[unit] = np.log(_at(others, percent / 100))
    whole = math.log(_at(samples.values, percent / 100))
    return count * whole - (count - 1) * left


def _limits(
    inside: NDArray[np.bool_], numbers: Ints, level: float, blocks: int
) -> tuple[float, float]:
    """The interval of a proportion, by Korn and Graubard."""
    count, effect, freedom = len(inside), 1.0, max(blocks - 1.0, 1.0)
    independent = level * (1 - level) / count
    if blocks > 1 and independent > 0:
        residuals = np.bincount(numbers, inside - inside.mean(), blocks) / count
        variance = blocks / (blocks - 1) * float((residuals**2).sum())
        effect = max(variance / independent, 1.0)
    effective = count / effect * (_t(math.inf) / _t(freedom)) ** 2
    good, bad = level * effective, (1 - level) * effective
    low = float(special.betaincinv(good, bad + 1, _TAIL)) if good > 0 else 0.0
    high = float(special.betaincinv(good + 1, bad, 1 - _TAIL)) if bad > 0 else 1.0
    return low, high


def _t(freedom: float) -> float:
    """Student's quantile; the normal one without limit."""
    return float(special.stdtrit(freedom, 1 - _TAIL))


def _at(values: Floats, level: float) -> float:
    """The value that a share `level` of the sorted values does not exceed."""
    rank = max(math.ceil(level * len(values) - 1e-9), 1)
    return float(values[min(rank, len(values)) - 1])

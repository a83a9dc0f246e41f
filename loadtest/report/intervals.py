"""Percentiles, proportions, rates and ratios of latencies, with 95 % confidence intervals.

Requests of the same seconds share a queue and a batch, so they are not independent. The unit of
chance is therefore a *block* of time that is longer than the server's memory, as a cluster is in a
survey. The methods are those of surveys:

- A proportion has the interval of Korn and Graubard (1998): Clopper and Pearson's, with the number
  of requests divided by the design effect, that is, by how much more blocks differ than they would
  if requests were independent. It stays right near 0 and 1, where nothing has failed yet.
- A percentile has Woodruff's (1952): the percentiles at both ends of the interval of its level. It
  needs no density, takes infinite latencies, and has no end where the data has none.
- A ratio of two percentiles has the least and the greatest ratio of any pair of levels that the
  samples do not contradict: the pairs within 1.96 standard errors, an ellipse, because both levels
  vary together as much as their blocks do. (It is a profile likelihood interval.) Under the same
  schedule the blocks of both servers are paired, and what they share by chance cancels. A sum of
  squares of both half widths would be shorter to write, but where values lie in two heaps, as worst
  gaps do, what is not known lies to one side, and the ratio may be least between its ends.
- Where neither percentile is at the edge of a heap and blocks are paired, a block bootstrap
  (Carlstein, 1986) is narrower and holds as it says: whole blocks are drawn with replacement, the
  same for both servers, so that what single requests share cancels, too. Few blocks make it too
  narrow. So errors of logarithms are widened by sqrt(n/(n-1)) and by Student's quantile over the
  normal one, which is what Hesterberg (2015) does to levels; levels would end at the most extreme
  of few blocks. Above the 90th percentile, errors are also widened where slowish requests come in
  clusters more than the few slow ones show, and near saturation the wider of both intervals counts.

Two starts of one server differ, too: by where its memory lies, by what was compiled how, by the
clocks of its GPU. Blocks of one start do not show that. So each interval of a percentile, a rate or
a ratio is at least as wide as the one in which the starts, not the blocks, are the unit of chance,
by Student's quantile. Each start has a percentile of its own, and these are compared (the random
groups of Wolter, 1985): a jackknife that leaves out one start at a time is too narrow for a median
where starts differ more than requests do. It is far wider for two starts, and one start tells
nothing: its interval is of that start alone. Shares of requests, and so capacities, do not have
this part.

Degrees of freedom follow from the kurtosis of what blocks add to the error (Satterthwaite, 1946):
where a few blocks have all the slow requests, few blocks count.

Some intervals cannot hold exactly 95 %. docs/decisions.md names the page that has what they hold.

- Gaps between tokens are nearly a lattice: steps with a prompt and steps without one. A percentile
  has the same value for a range of levels there, so its interval holds the truth almost always, as
  Clopper and Pearson's does for a count.
- A percentile that less than some four requests exceed, as p99.9 in minutes, has no upper limit.
- Near saturation, a few bursts make all slow answers. A run without a rare one knows neither the
  99th percentile nor how wide its interval should be. More schedules help, because each has bursts
  of its own. `clustering` tells such a load also where the bursts happened to stay away.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import special

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
_TAIL = 0.025
# Slow requests come together at least as much as slowish ones do. Where a run happens to have few
# of them, its own 99th percentile would hide that.
_CLUSTERED_FROM = 90.0
# Simulated: up to the highest rate that keeps the SLO, the design effect of TTFT p99 is 1 to 6. At
# half as much again it is about 10, and draws of blocks differ less than schedules do.
_BURSTS = 6.0
_DRAWS = 1999  # of all blocks
_BEYOND = 49  # draws beyond each limit: a share of 50 in 2000
_PLACES = 4096  # at which a percentile of a draw may be
_KNOTS = 17  # of the errors of a percentile: one at the percentile itself, and at every fourth of 4


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number and its 95 % confidence interval.

    `low` or `high` is -inf or inf where the data sets no limit, and NaN without any data.
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

    @property
    def is_settled(self) -> bool:
        """Whether more data cannot narrow it: nothing was measured, or all of it is one number."""
        return math.isnan(self.value) or self.low == self.value == self.high


@dataclass(frozen=True, slots=True)
class Samples:
    """Values of one measure, infinite for a request that failed, each with its block's number."""

    values: Floats
    blocks: Ints


@dataclass(frozen=True, slots=True)
class _Spread:
    """How far a proportion of a sample may be from the true one.

    Attributes:
        residuals: [blocks], what each block adds to the error of the proportion.
        effect: the design effect, at least 1.
        freedom: degrees of freedom of its estimate.
    """

    residuals: Floats
    effect: float
    freedom: float


def percentile(
    samples: Samples, percent: float, blocks: int, starts: Ints | None = None
) -> Estimate:
    """The smallest value that at least `percent` % of the samples do not exceed.

    `starts` [blocks] numbers the start of the server that each block is of; None: all are of one.
    """
    if not len(samples.values):
        return Estimate(math.nan, math.nan, math.nan)
    level = _Level.of(samples, percent, blocks)
    if starts is None:
        return level.estimate
    return _widened(level.estimate, _between([level.of_each(starts)]))


def clustering(samples: Samples, percent: float, blocks: int) -> float:
    """The design effect of a percentile's level: 1 if samples are independent, else more."""
    return _Level.of(samples, percent, blocks).own.effect if len(samples.values) else 1.0


def proportion(samples: Samples, blocks: int) -> Estimate:
    """The share of samples that are 1 rather than 0."""
    count = len(samples.values)
    if not count:
        return Estimate(math.nan, math.nan, math.nan)
    share = float(samples.values.mean())
    low, high = _limits(share, count, _spread(samples.values == 1, samples.blocks, share, blocks))
    return Estimate(share, low, high)


def rate(amounts: Floats, seconds: Floats, starts: Ints | None = None) -> Estimate:
    """The mean amount per second of blocks of `seconds` [blocks], by Student's interval.

    Amounts are never negative, and neither is the lower limit. `starts` is as in `percentile`.
    """
    mean = float(amounts.sum() / seconds.sum())
    if len(amounts) < 2:
        return Estimate(mean, math.nan, math.nan)
    spread = float((amounts / seconds).std(ddof=1))
    half = _t(len(amounts) - 1) * spread / math.sqrt(len(amounts))
    if starts is not None and (many := int(starts.max()) + 1) > 1:
        each = np.bincount(starts, amounts) / np.bincount(starts, seconds)
        half = max(half, _t(many - 1) * float(each.std(ddof=1)) / math.sqrt(many))
    return Estimate(mean, max(mean - half, 0.0), mean + half)


def ratio(
    base: Samples,
    other: Samples,
    percent: float,
    blocks: tuple[int, int],
    paired: bool,
    starts: tuple[Ints, Ints] | None = None,
) -> Estimate:
    """The percentile of `base` divided by that of `other`.

    Args:
        base: the numerator's samples.
        other: the denominator's.
        percent: which percentile.
        blocks: how many blocks each has.
        paired: whether block i of both is the same seconds of the same schedule.
        starts: of both, as in `percentile`.
    """
    if not (len(base.values) and len(other.values)):
        return Estimate(math.nan, math.nan, math.nan)
    one, two = _Level.of(base, percent, blocks[0]), _Level.of(other, percent, blocks[1])
    top, bottom = one.estimate, two.estimate
    # Also 0 has no logarithm: a proxy that holds tokens back delivers many at one moment.
    if not math.isfinite(top.value + bottom.value) or min(top.low, bottom.low) <= 0:
        return limits_of_ratio(top, bottom)
    value = top.value / bottom.value
    together = _correlation(one.spread, two.spread) if paired else 0.0
    # One block cannot say how much blocks differ.
    if not paired or blocks[0] == 1 or one.jumps or two.jumps:
        low, high = _profile(one, two, _without_doubt(together, blocks[0]))
    else:
        low, high = _bootstrap(one, two)
        if one.is_in_bursts or two.is_in_bursts:
            other_low, other_high = _profile(one, two, together)
            low, high = min(low, other_low), max(high, other_high)
    found = Estimate(
        value,
        0.0 if math.isinf(bottom.high) else value * math.exp(min(low, 0.0)),
        math.inf if math.isinf(top.high) else value * math.exp(min(max(high, 0.0), 700.0)),
    )
    if starts is None:
        return found
    each = [one.of_each(starts[0]), two.of_each(starts[1])]
    if paired and np.array_equal(*starts):
        each = [each[0] - each[1]]
    return _widened(found, _between(each))


def ratio_of_totals(
    top: tuple[Floats, Floats],
    bottom: tuple[Floats, Floats],
    paired: bool,
    starts: tuple[Ints, Ints] | None = None,
) -> Estimate:
    """The amount for each unit in `top` divided by that in `bottom`, by linearization.

    Args:
        top: the amounts and the units of each block, [blocks] each.
        bottom: those of the other server.
        paired: whether block i of both is the same seconds of the same schedule.
        starts: of both, as in `percentile`.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        one, two = (amounts.sum() / units.sum() for amounts, units in (top, bottom))
        value = float(one / two)
        # What each block adds to the error of the logarithm.
        errors = [a / a.sum() - u / u.sum() for a, u in (top, bottom)]
    if min(map(len, errors)) < 2 or math.isnan(value):
        return Estimate(value, 0.0 if value >= 0 else math.nan, math.inf)
    if value == 0 or math.isinf(value):  # nothing at all, in two blocks or more
        return Estimate(value, value, value)
    numbers = list(starts or ())
    if paired:
        errors = [errors[0] - errors[1]]
        numbers = numbers[:1] if starts is not None and np.array_equal(*starts) else []
    half = _half_width(errors, [_freedom(e) for e in errors])
    of_starts = [
        np.bincount(n, e).astype(np.float64) for n, e in zip(numbers, errors, strict=False)
    ]
    if numbers and min(map(len, of_starts)) > 1:
        half = max(half, _half_width(of_starts, [len(e) - 1.0 for e in of_starts]))
    return Estimate(value, value * math.exp(-half), value * math.exp(half))


def _half_width(errors: Sequence[Floats], freedom: Sequence[float]) -> float:
    """Of a sum of independent errors, each the sum of what its parts add to it."""
    variance = sum(len(e) / (len(e) - 1) * float((e**2).sum()) for e in errors)
    return _t(min(freedom)) * math.sqrt(variance)


def _between(each: Sequence[Floats]) -> float:
    """The half width by starts alone of a sum of logarithms, each [starts] of one start."""
    if min(map(len, each)) < 2:
        return 0.0
    if not all(np.isfinite(logs).all() for logs in each):
        return math.inf
    errors = [(logs - logs.mean()) / len(logs) for logs in each]
    return _half_width(errors, [len(logs) - 1.0 for logs in each])


def _widened(estimate: Estimate, half: float) -> Estimate:
    """The estimate, with a logarithm that may be off by `half` at least."""
    value = estimate.value
    if not (math.isfinite(value) and value > 0 and half > 0):
        return estimate
    factor = math.exp(half) if half < 700 else math.inf
    return Estimate(value, min(estimate.low, value / factor), max(estimate.high, value * factor))


def _bootstrap(one: "_Level", two: "_Level") -> tuple[float, float]:
    """The errors of the logarithm of the ratio of paired percentiles, at both limits."""
    blocks = one.blocks
    own = math.log(one.estimate.value / two.estimate.value)
    with np.errstate(divide="ignore", invalid="ignore"):
        errors = _log_ratio(one, two, _draws(blocks)) - own
        left_out = _log_ratio(one, two, 1.0 - np.eye(blocks))
    freedom = blocks - 1.0
    if np.isfinite(left_out).all():
        freedom = _freedom(left_out - left_out.mean())
    wider = math.sqrt(blocks / (blocks - 1) * (one.hidden + two.hidden) / 2)
    wider *= _t(freedom) / _t(math.inf)
    # In a draw, both may be infinite: then the ratio may be anything.
    low = np.sort(np.where(np.isnan(errors), -math.inf, errors))[_BEYOND]
    high = np.sort(np.where(np.isnan(errors), math.inf, errors))[-1 - _BEYOND]
    return wider * float(low), wider * float(high)


def _log_ratio(one: "_Level", two: "_Level", times: Floats) -> Floats:
    """The logarithm of the ratio with each block as many times as a row of `times` says."""
    found = np.log(one.percentiles(times)) - np.log(two.percentiles(times))
    return np.asarray(found, dtype=np.float64)


@functools.lru_cache(maxsize=8)
def _draws(blocks: int) -> Floats:
    """[draws, blocks], how often each block is in a draw. Always the same, and so is a report."""
    random = np.random.default_rng(0)
    return random.multinomial(blocks, np.full(blocks, 1 / blocks), _DRAWS).astype(np.float64)


def _profile(one: "_Level", two: "_Level", together: float) -> tuple[float, float]:
    """As `_bootstrap`, of percentiles whose levels have the correlation `together`."""
    first, second = _scores()
    both = together * first + math.sqrt(1 - together**2) * second
    errors = one.log_errors(first) - two.log_errors(both)
    return float(errors.min()), float(errors.max())


@dataclass(frozen=True)
class _Level:
    """A percentile as a level of sorted values that is known up to its spread."""

    values: Floats
    numbers: Ints
    blocks: int
    level: float
    own: _Spread

    @classmethod
    def of(cls, samples: Samples, percent: float, blocks: int) -> "_Level":
        values, numbers = _sorted(samples)
        level = percent / 100
        inside = values <= _at(values, level)
        return cls(values, numbers, blocks, level, _spread(inside, numbers, level, blocks))

    @functools.cached_property
    def spread(self) -> _Spread:
        """The spread of the level, at least as clustered as that of a level with more beyond it."""
        level = _CLUSTERED_FROM / 100
        if self.level <= level:
            return self.own
        inside = self.values <= _at(self.values, level)
        wider = _spread(inside, self.numbers, level, self.blocks)
        effect = max(self.own.effect, wider.effect)
        return _Spread(self.own.residuals, effect, self.own.freedom)

    @property
    def hidden(self) -> float:
        """By how much the variance is larger than the values at this level alone show."""
        return self.spread.effect / self.own.effect

    @property
    def estimate(self) -> Estimate:
        """The percentile, and those at both ends of the interval of its level."""
        value = _at(self.values, self.level)
        low, high = self._at_scores(np.array([-_t(math.inf), _t(math.inf)]))
        return Estimate(value, min(low, value), max(high, value))

    def log_errors(self, scores: Floats) -> Floats:
        """How far the percentile's logarithm may be off, at each normal score of its level.

        Scores lie within 1.96 standard errors. The errors are linear between a few knots, because
        each percentile has noise of its own, which is no part of what two servers differ in. Near
        the edge of a heap, which makes one step larger than all others together, knots are close.
        Where there is no upper limit, the logarithm goes as far above the value as below it.
        """
        steps = np.diff(self._errors)
        every = 1 if steps.max() > steps.sum() / 2 else _KNOTS // 4
        return np.asarray(np.interp(scores, _knots()[::every], self._errors[::every]))

    def percentiles(self, times: Floats) -> Floats:
        """[rows] with each block as many times as a row of `times` [rows, blocks] says."""
        at, counts = self._counts
        wanted = self.level * (times @ counts[-1]) - 1e-9
        # The first place at which the values up to it are enough, by bisection in all rows at once.
        low, high = np.zeros(len(times), dtype=np.int64), np.full(len(times), len(at) - 1)
        while (low < high).any():
            middle = (low + high) // 2
            enough = np.einsum("rb,rb->r", counts[middle], times) >= wanted
            low, high = np.where(enough, low, middle + 1), np.where(enough, middle, high)
        return np.asarray(at[low], dtype=np.float64)

    def of_each(self, starts: Ints) -> Floats:
        """[starts], the logarithm of the percentile of each of them; NaN without a request."""
        times = (starts == np.arange(starts.max() + 1)[:, None]).astype(np.float64)
        with np.errstate(divide="ignore"):
            logs = np.log(self.percentiles(times))
        return np.where(times @ self._counts[1][-1] > 0, logs, math.nan)

    @functools.cached_property
    def _counts(self) -> tuple[Floats, Floats]:
        """Values [places], and how many of each block do not exceed them [places + 1, blocks].

        The last row has all values. A percentile of several blocks is between those of each block.
        """
        sizes = np.bincount(self.numbers, minlength=self.blocks)
        ranks = np.maximum(np.ceil(self.level * sizes - 1e-9), 1).astype(int)
        # Of each block, its values in ascending order; then where its own percentile is.
        ordered = np.argsort(self.numbers, kind="stable")
        alone = ordered[(np.cumsum(sizes) - sizes + ranks - 1)[sizes > 0]]
        first, last = int(alone.min()), int(alone.max())
        places = np.unique(np.linspace(first, last, min(last - first + 1, _PLACES)).astype(int))
        part = np.searchsorted(places, np.arange(len(self.values)))
        shape = (len(places) + 1, self.blocks)
        counts = np.bincount(part * self.blocks + self.numbers, minlength=math.prod(shape))
        return self.values[places], np.cumsum(counts.reshape(shape), axis=0, dtype=np.float64)

    @property
    def jumps(self) -> bool:
        """Whether it is at the edge of a heap: one step is larger than all others together."""
        steps = np.diff(self._errors)
        return bool(steps.max() > steps.sum() / 2 and steps.sum() > 0.05)

    @property
    def is_in_bursts(self) -> bool:
        """Whether it is beyond what is slowish, and what is beyond it comes in few bursts."""
        return self.level > _CLUSTERED_FROM / 100 and self.spread.effect > _BURSTS

    @functools.cached_property
    def _errors(self) -> Floats:
        """[knots], the errors of the percentile's logarithm at evenly spread scores."""
        found = np.log(self._at_scores(_knots()))
        own = found[_KNOTS // 2]
        return np.where(np.isinf(found), own - found[::-1], found - own)

    def _at_scores(self, scores: Floats) -> list[float]:
        """The percentiles at normal scores of the level; infinite where no value bounds them."""
        count = len(self.values)
        below, above = _quantiles(self.level, count, self.spread, special.ndtr(scores))
        found = []
        for score, low, high in zip(scores, below, above, strict=True):
            if score <= 0:
                found.append(_at(self.values, low if score < 0 else self.level))
            else:
                # Beyond this level there is no value: the next one may be anything.
                found.append(_at(self.values, high) if high <= count / (count + 1) else math.inf)
        return found


@functools.cache
def _knots() -> Floats:
    return _t(math.inf) * np.linspace(-1.0, 1.0, _KNOTS)


@functools.cache
def _scores() -> tuple[Floats, Floats]:
    """Pairs of independent normal scores, in and on the circle of 1.96 standard errors.

    Its projection on any line is a 95 % interval. So where a ratio's logarithm is linear in both
    scores, its least and greatest value are the limits of the usual interval.
    """
    radius, angle = np.meshgrid(
        _t(math.inf) * np.array([0.25, 0.5, 0.75, 1.0]), np.linspace(0, 2 * math.pi, 180, False)
    )
    return (radius * np.cos(angle)).ravel(), (radius * np.sin(angle)).ravel()


def _correlation(one: _Spread, two: _Spread) -> float:
    """The correlation of what the blocks of both add to the errors of their percentiles."""
    size = math.sqrt(float((one.residuals**2).sum() * (two.residuals**2).sum()))
    if size == 0:
        return 0.0
    # Rounding alone may take it a little beyond -1 or 1.
    return min(max(float(one.residuals @ two.residuals) / size, -1.0), 1.0)


def _without_doubt(correlation: float, blocks: int) -> float:
    """The lower end of Fisher's (1921) interval of a positive correlation, but no less than 0.

    Two percentiles of which one jumps move together only as far as they rise at the same levels.
    Then a correlation that few blocks show too high makes the ratio look surer than it is.
    """
    if correlation <= 0 or blocks < 4:
        return min(correlation, 0.0)
    half = _t(math.inf) / math.sqrt(blocks - 3)
    return max(math.tanh(math.atanh(min(correlation, 1 - 1e-9)) - half), 0.0)


def limits_of_ratio(top: Estimate, bottom: Estimate) -> Estimate:
    """A ratio between the limits that its parts set, where one is 0, infinite or only limited."""
    with np.errstate(divide="ignore", invalid="ignore"):
        value = float(np.float64(top.value) / bottom.value)
        low = float(np.float64(top.low) / bottom.high)
        high = float(np.float64(top.high) / bottom.low)
    return Estimate(value, 0.0 if math.isnan(low) else low, math.inf if math.isnan(high) else high)


def _spread(inside: NDArray[np.bool_], numbers: Ints, level: float, blocks: int) -> _Spread:
    share, count = inside.mean(), len(inside)
    residuals = np.bincount(numbers, inside - share, blocks) / count
    independent = level * (1 - level) / count
    if blocks < 2 or independent <= 0:
        return _Spread(residuals, 1.0, max(blocks - 1.0, 1.0))
    variance = blocks / (blocks - 1) * float((residuals**2).sum())
    return _Spread(residuals, max(variance / independent, 1.0), _freedom(residuals))


def _freedom(residuals: Floats) -> float:
    """Degrees of freedom of the sum of squares: of the normal ones that vary as much."""
    blocks, squares = len(residuals), float((residuals**2).sum())
    if blocks < 2:
        return 1.0
    if squares <= 0:
        return blocks - 1.0
    kurtosis = blocks * float((residuals**4).sum()) / squares**2
    return max(min(blocks - 1.0, 2 * blocks / max(kurtosis - 1, 1e-9)), 1.0)


def _limits(level: float, count: int, spread: _Spread) -> tuple[float, float]:
    """The interval of a proportion, by Korn and Graubard."""
    low = _quantiles(level, count, spread, np.array([_TAIL]))[0]
    high = _quantiles(level, count, spread, np.array([1 - _TAIL]))[1]
    return float(low[0]), float(high[0])


def _quantiles(level: float, count: int, spread: _Spread, chances: Floats) -> tuple[Floats, Floats]:
    """The lower and the upper limits of a proportion, each with these chances of lying above it."""
    effective = count / spread.effect * (_t(math.inf) / _t(spread.freedom)) ** 2
    inside, outside = level * effective, (1 - level) * effective
    none = np.zeros_like(chances)
    low = special.betaincinv(inside, outside + 1, chances) if inside > 0 else none
    high = special.betaincinv(inside + 1, outside, chances) if outside > 0 else none + 1
    return low, high


def _t(freedom: float) -> float:
    """Student's quantile; the normal one without limit."""
    return float(special.stdtrit(freedom, 1 - _TAIL))


def ascending(samples: Samples) -> Samples:
    """The same samples in ascending order, so that each percentile need not sort them again."""
    order = np.argsort(samples.values, kind="stable")
    return Samples(samples.values[order], samples.blocks[order])


def _sorted(samples: Samples) -> tuple[Floats, Ints]:
    if not bool(np.all(samples.values[:-1] <= samples.values[1:])):
        samples = ascending(samples)
    return samples.values, samples.blocks


def _at(values: Floats, level: float) -> float:
    """The value that a share `level` of the sorted values does not exceed."""
    rank = max(math.ceil(level * len(values) - 1e-9), 1)
    return float(values[min(rank, len(values)) - 1])

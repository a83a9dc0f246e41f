"""Percentiles are exact. Intervals cover the true value and widen with dependence in time."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.report.blocks import Blocks, block_seconds
from loadtest.report.intervals import (
    Estimate,
    Floats,
    Ints,
    Samples,
    percentile,
    proportion,
    rate,
    ratio,
    ratio_of_totals,
)

BLOCKS, REQUESTS = 12, 60  # of a start, of a block


def drawn(
    seed: int, starts: int, true: float, stalls: float, spread: float
) -> tuple[Samples, Samples, Ints]:
    """Seconds of both servers under the same schedules, and the start of each block.

    The second one is `true` times as fast.
    There are `stalls` of a second or so in a start, on average, of some ten requests each. Starts
    differ by a standard deviation of `spread`, as a fraction.
    """
    rng = np.random.default_rng(seed)
    numbers = np.repeat(np.arange(starts * BLOCKS), REQUESTS)
    shared = rng.normal(0, 0.3, len(numbers)) + rng.normal(0, 0.1, starts * BLOCKS)[numbers]

    def server() -> Floats:
        noise = rng.normal(0, spread, starts)[numbers // BLOCKS] + rng.normal(0, 0.05, len(numbers))
        seconds = 0.2 * np.exp(shared + noise)
        for first in rng.integers(0, len(seconds), rng.poisson(stalls * starts)):
            seconds[first : first + 10] += rng.exponential(1.0)
        return np.asarray(seconds)

    base, other = server(), server() / true
    of_starts = np.repeat(np.arange(starts), BLOCKS)
    return Samples(base, numbers), Samples(other, numbers), of_starts


def shares(
    starts: int, percent: float, true: float, stalls: float, spread: float, experiments: int
) -> tuple[int, int]:
    """How many intervals hold the truth, and how many tell the servers apart."""
    ratios = []
    for seed in range(experiments):
        *both, units = drawn(seed, starts, true, stalls, spread)
        units = units if starts > 1 else np.arange(len(units))
        ratios.append(ratio(*both, percent, (units, units), paired=True, by_start=starts > 1))
    held = sum(e.low <= true <= e.high for e in ratios)
    return held, sum(e.low > 1 or e.high < 1 for e in ratios)


@given(
    values=st.lists(st.floats(-1e6, 1e6) | st.just(math.inf), min_size=1, max_size=200),
    percent=st.sampled_from([1.0, 50.0, 90.0, 99.0, 100.0]),
    blocks=st.integers(1, 9),
)
def test_a_percentile_is_a_value_that_was_measured_within_its_limits(
    values: list[float], percent: float, blocks: int
) -> None:
    samples = Samples(np.array(values), np.arange(len(values)) % blocks)
    estimate = percentile(samples, percent, blocks)
    expected = sorted(values)[max(math.ceil(percent / 100 * len(values) - 1e-9), 1) - 1]
    assert estimate.value == expected
    assert estimate.low <= estimate.value <= estimate.high
    assert estimate.low in values
    assert estimate.high in [*values, math.inf]


@given(
    good=st.lists(st.booleans(), min_size=1, max_size=200),
    blocks=st.integers(1, 9),
)
def test_a_proportion_is_within_its_limits_and_those_within_0_and_1(
    good: list[bool], blocks: int
) -> None:
    samples = Samples(np.array(good, dtype=np.float64), np.arange(len(good)) % blocks)
    estimate = proportion(samples, blocks)
    assert 0 <= estimate.low <= estimate.value <= estimate.high <= 1
    assert estimate.value == pytest.approx(np.mean(good))
    assert estimate.high > estimate.low


def test_without_a_failure_the_limit_is_that_of_clopper_and_pearson() -> None:
    # "Rule of three": 0 of n leave up to 3.7 / n, at 97.5 %.
    good = Samples(np.ones(57), np.arange(57) % 19)
    assert proportion(good, 19).low == pytest.approx(0.025 ** (1 / 57), abs=0.01)
    assert proportion(good, 19).low < 0.99


def alike(rng: np.random.Generator, blocks: int, each: int) -> tuple[Floats, Ints]:
    """Values whose neighbours are alike: a block shares an offset as large as their own noise."""
    numbers = np.repeat(np.arange(blocks), each)
    return rng.normal(size=len(numbers)) + rng.normal(size=blocks)[numbers], numbers


def holds(covered: int, of: int) -> bool:
    """Whether 95 % is likely, by a binomial bound of three standard deviations."""
    return abs(covered / of - 0.95) <= 3 * math.sqrt(0.95 * 0.05 / of)


def holds_at_least(covered: int, of: int) -> bool:
    """As `holds`, for intervals that leave room: what two servers share is not known exactly."""
    return covered / of >= 0.95 - 3 * math.sqrt(0.95 * 0.05 / of)


@pytest.mark.parametrize(("percent", "true"), [(50.0, 0.0), (90.0, 1.8124)])
def test_percentiles_cover_the_truth_as_often_as_they_say(percent: float, true: float) -> None:
    rng = np.random.default_rng(1)
    covered = 0
    for _ in range(300):
        estimate = percentile(Samples(*alike(rng, 30, 25)), percent, 30)
        covered += estimate.low <= true <= estimate.high
    assert holds(covered, 300)


@pytest.mark.parametrize("percent", [50.0, 99.0])
@pytest.mark.parametrize("stalls", [0.0, 0.2, 0.7])
@pytest.mark.parametrize(("starts", "spread"), [(1, 0.0), (2, 0.01), (3, 0.01)])
def test_ratios_hold_the_truth_also_where_rare_stalls_make_the_tail(
    starts: int, spread: float, stalls: float, percent: float
) -> None:
    held, told = shares(starts, percent, 1.2, stalls, spread, 120)
    assert holds_at_least(held, 120)
    if starts > 1 and not stalls:
        # They are told apart as often as starts allow.
        assert told / 120 >= {(2, 50.0): 0.7, (3, 50.0): 0.99, (3, 99.0): 0.85}.get(
            (starts, percent), 0.0
        )


def test_one_start_tells_nothing_of_others() -> None:
    # Its own interval is narrow, and the starts' spread of 5 % is not in it.
    assert shares(1, 50.0, 1.0, 0.0, 0.05, 60)[0] < 40
    assert holds_at_least(shares(3, 50.0, 1.0, 0.0, 0.05, 60)[0], 60)


@given(
    values=st.lists(st.tuples(st.floats(0.01, 10), st.floats(0.01, 10)), min_size=2, max_size=60),
    units=st.integers(1, 4),
    paired=st.booleans(),
    by_start=st.booleans(),
)
def test_a_ratio_is_within_its_limits(
    values: list[tuple[float, float]], units: int, paired: bool, by_start: bool
) -> None:
    numbers = np.arange(len(values)) % units
    one, two = (Samples(np.array([pair[i] for pair in values]), numbers) for i in (0, 1))
    both = np.arange(units), np.arange(units)
    estimate = ratio(one, two, 50.0, both, paired, by_start)
    assert 0 <= estimate.low <= estimate.value <= estimate.high


def ratio_of_starts(one: list[float], two: list[float]) -> Estimate:
    """The ratio of two servers whose every request of a start takes so many seconds."""
    numbers = np.repeat(np.arange(len(one)), 10)
    units = np.arange(len(one)), np.arange(len(two))
    base, other = Samples(np.repeat(one, 10), numbers), Samples(np.repeat(two, 10), numbers)
    return ratio(base, other, 99.0, units, True, by_start=True)


def test_what_has_no_limit_says_so() -> None:
    few = Samples(np.arange(1.0, 58.0), np.arange(57) % 19)
    assert math.isinf(percentile(few, 99.0, 19).high)
    assert math.isfinite(percentile(few, 50.0, 19).high)
    inf = math.inf
    # All starts took forever, some did, and those of both did.
    assert ratio_of_starts([1.0, 2.0], [inf, inf]) == Estimate(0, 0, 0)
    assert ratio_of_starts([1.0, 2.0], [inf, 2.0]) == Estimate(0, 0, inf)
    assert math.isnan(ratio_of_starts([inf, inf], [inf, inf]).value)
    # Tokens of one read have one time stamp: most gaps are 0 behind a proxy that buffers.
    assert ratio_of_starts([1.0, 2.0], [0.0, 0.0]) == Estimate(inf, inf, inf)
    assert ratio_of_starts([0.0, 0.0], [1.0, 2.0]) == Estimate(0, 0, 0)
    assert ratio_of_starts([1.0], [2.0]) == Estimate(0.5, 0, inf)


def test_no_samples_give_no_number() -> None:
    nothing = Samples(np.array([]), np.array([], dtype=np.int64))
    for estimate in (percentile(nothing, 50.0, 3), proportion(nothing, 3)):
        assert np.isnan([estimate.value, estimate.low, estimate.high]).all()


def test_a_rate_has_the_interval_of_its_blocks() -> None:
    estimate = rate(np.array([19.0, 20.0, 21.0]), np.full(3, 10.0))
    assert estimate.value == 2.0
    assert estimate.high - 2.0 == pytest.approx(2.0 - estimate.low)
    assert estimate.high == pytest.approx(2 + 0.43027 / math.sqrt(3), abs=1e-4)
    # No server answers fewer than no requests per second.
    assert rate(np.array([0.0, 0.0, 30.0]), np.full(3, 10.0)).low == 0
    assert rate(np.array([10.0, 30.0]), np.array([10.0, 20.0])).value == pytest.approx(4 / 3)


def test_blocks_are_windows_of_time_as_long_as_the_memory() -> None:
    numbers = Blocks(begin=5.0, width=10.0, first=4, count=3).of([5.0, 14.9, 15.0, 34.0])
    assert numbers.tolist() == [4, 4, 5, 6]
    assert block_seconds(240, 2.0) == 20
    assert block_seconds(240, 10.0) == 40
    assert block_seconds(60, 100.0) == 60


def test_a_ratio_of_totals_has_the_error_that_units_share_taken_out() -> None:
    random = np.random.default_rng(1)
    units, each = random.uniform(5, 15, 12), (np.arange(12), np.arange(12))
    half = ratio_of_totals((units / 2, units), (units, units), each, paired=True)
    assert (half.low, half.value, half.high) == pytest.approx((0.5, 0.5, 0.5))
    held = 0
    for _ in range(300):
        shared = random.lognormal(0, 0.3, 12)
        top, bottom = (shared * random.lognormal(0, 0.05, 12) * units for _ in range(2))
        paired = ratio_of_totals((top, units), (bottom, units), each, paired=True)
        apart = ratio_of_totals((top, units), (bottom, units), each, paired=False)
        assert paired.relative < apart.relative
        held += paired.low <= 1 <= paired.high
    assert holds(held, 300)
    none = ratio_of_totals((units * 0, units), (units, units), each, paired=True)
    assert none == Estimate(0, 0, 0)
    assert math.isnan(ratio_of_totals((units * math.nan, units), (units, units), each, True).value)


def test_starts_that_differ_are_in_the_interval_of_a_percentile_and_of_a_rate() -> None:
    def held(known: bool) -> float:
        medians = []
        for seed in range(150):
            one, _, starts = drawn(seed, 5, 1.0, 0.0, 0.05)
            medians.append(percentile(one, 50.0, len(starts), starts if known else None))
        return float(np.mean([e.low <= 0.2 <= e.high for e in medians]))

    assert held(True) > 0.9 > held(False)
    amounts, starts = np.array([1.0, 1.0, 2.0, 2.0]), np.array([0, 0, 1, 1])
    assert rate(amounts, np.ones(4), starts).relative > rate(amounts, np.ones(4)).relative

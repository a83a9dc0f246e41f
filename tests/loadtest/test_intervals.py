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
    _Level,
    clustering,
    percentile,
    proportion,
    rate,
    ratio,
    ratio_of_totals,
)


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


@pytest.mark.parametrize("paired", [True, False])
def test_ratios_cover_the_truth_as_often_as_they_say(paired: bool) -> None:
    rng = np.random.default_rng(2)
    covered, widths = 0, []
    for _ in range(120):
        values, numbers = alike(rng, 30, 25)
        base = Samples(np.exp(values), numbers)
        more = values + rng.normal(scale=0.1, size=len(values)) if paired else alike(rng, 30, 25)[0]
        other = Samples(np.exp(more) / 1.5, numbers)
        estimate = ratio(base, other, 50.0, (30, 30), paired)
        covered += estimate.low <= 1.5 <= estimate.high
        widths.append(estimate.relative)
    assert holds_at_least(covered, 120)
    # What both have in common by chance cancels.
    assert np.median(widths) < 0.15 if paired else np.median(widths) > 0.4


@pytest.mark.parametrize("blocks", [4, 8])
def test_ratios_of_few_blocks_cover_the_truth(blocks: int) -> None:
    # Draws of few blocks differ less than blocks do, and end at the most extreme of them.
    rng = np.random.default_rng(4)
    covered = 0
    for _ in range(120):
        values, numbers = alike(rng, blocks, 25)
        more = values + rng.normal(scale=0.1, size=blocks)[numbers]
        base, other = Samples(np.exp(values), numbers), Samples(np.exp(more), numbers)
        estimate = ratio(base, other, 50.0, (blocks, blocks), True)
        covered += estimate.low <= 1.0 <= estimate.high
    assert holds_at_least(covered, 120)


def test_ratios_of_what_comes_in_bursts_cover_the_truth() -> None:
    # One block in ten has a burst, which makes all of the slowest percent.
    rng = np.random.default_rng(7)
    covered = 0
    for _ in range(100):
        values, numbers = alike(rng, 24, 100)
        values = values + np.where(rng.random(24) < 0.1, rng.exponential(3.0, 24), 0.0)[numbers]
        one, two = (values + rng.normal(scale=0.3, size=24)[numbers] for _ in range(2))
        base, other = Samples(np.exp(one), numbers), Samples(np.exp(two) / 1.5, numbers)
        estimate = ratio(base, other, 99.0, (24, 24), True)
        covered += estimate.low <= 1.5 <= estimate.high
    assert holds_at_least(covered, 100)


@given(
    values=st.lists(st.floats(0, 10) | st.just(math.inf), min_size=4, max_size=60),
    percent=st.sampled_from([10.0, 50.0, 99.0]),
    times=st.lists(st.integers(0, 3), min_size=4, max_size=4).filter(any),
)
def test_a_percentile_of_drawn_blocks_is_that_of_their_values(
    values: list[float], percent: float, times: list[int]
) -> None:
    numbers = np.arange(len(values)) % 4
    level = _Level.of(Samples(np.array(values), numbers), percent, 4)
    drawn = np.repeat(values, np.array(times)[numbers])
    expected = percentile(Samples(drawn, np.zeros(len(drawn), dtype=np.int64)), percent, 1).value
    assert level.percentiles(np.array([times], dtype=np.float64)).tolist() == [expected]


def test_clustering_is_1_for_independent_samples_and_grows_with_what_blocks_share() -> None:
    rng = np.random.default_rng(6)
    alone = Samples(rng.normal(size=3000), np.arange(3000) % 30)
    assert clustering(alone, 50.0, 30) < 2
    assert clustering(Samples(*alike(rng, 30, 100)), 50.0, 30) > 10
    assert clustering(Samples(np.array([]), np.array([], dtype=np.int64)), 50.0, 30) == 1


@pytest.mark.parametrize(("edges", "true"), [((0.05, -0.6), 0.4183), ((0.1, -0.3), 0.4266)])
def test_ratios_of_values_in_two_heaps_cover_the_truth(
    edges: tuple[float, float], true: float
) -> None:
    # As worst gaps are: those of answers that met a prompt, and of those that met none. A median
    # near the edge of a heap is well known to one side, and not at all to the other.
    rng = np.random.default_rng(3)
    covered = 0
    for _ in range(120):
        base, other = heaps(rng, 30, edges)
        estimate = ratio(base, other, 50.0, (30, 30), True)
        covered += estimate.low <= true <= estimate.high
    assert holds_at_least(covered, 120)


def heaps(
    rng: np.random.Generator, blocks: int, edges: tuple[float, float]
) -> tuple[Samples, Samples]:
    """Two servers' values around 1 and around 4. What is beyond its edge is in the upper heap."""
    shared, numbers = alike(rng, blocks, 25)
    of_both = (shared, shared + rng.normal(scale=0.1, size=len(shared)))
    one, two = (
        Samples(
            np.where(values > edge, 4.0, 1.0) * np.exp(rng.normal(scale=0.2, size=len(values))),
            numbers,
        )
        for values, edge in zip(of_both, edges, strict=True)
    )
    return one, two


@pytest.mark.parametrize(("edge", "true"), [(-0.02, 0.334), (0.1, 1.003)])
def test_ratios_cover_the_truth_where_one_percentile_lies_at_the_edge_of_a_heap(
    edge: float, true: float
) -> None:
    # As gaps between tokens at the 90th percentile: the faster server's are at the edge between
    # steps without and with a prompt, and the slower one's rise smoothly. The ratio is not least
    # where both levels are, but just beyond the edge.
    rng = np.random.default_rng(5)
    covered = 0
    for _ in range(120):
        values, numbers = alike(rng, 30, 25)
        base = Samples(np.exp(0.3 * values), numbers)
        more = values + rng.normal(scale=0.1, size=len(values))
        other = Samples(np.where(more > edge, 3.0, 1.0) * np.exp(0.1 * more), numbers)
        estimate = ratio(base, other, 50.0, (30, 30), True)
        covered += estimate.low <= true <= estimate.high
    assert holds_at_least(covered, 120)


@given(
    values=st.lists(st.tuples(st.floats(0.01, 10), st.floats(0.01, 10)), min_size=2, max_size=60),
    blocks=st.integers(1, 4),
    paired=st.booleans(),
)
def test_a_ratio_is_within_its_limits(
    values: list[tuple[float, float]], blocks: int, paired: bool
) -> None:
    numbers = np.arange(len(values)) % blocks
    one, two = (Samples(np.array([pair[i] for pair in values]), numbers) for i in (0, 1))
    estimate = ratio(one, two, 50.0, (blocks, blocks), paired)
    assert 0 <= estimate.low <= estimate.value <= estimate.high


def test_what_has_no_limit_says_so() -> None:
    few = Samples(np.arange(1.0, 58.0), np.arange(57) % 19)
    assert math.isinf(percentile(few, 99.0, 19).high)
    assert math.isfinite(percentile(few, 50.0, 19).high)
    failed = Samples(np.array([1.0, 2.0, math.inf, math.inf] * 20), np.arange(80) % 10)
    assert ratio(few, failed, 99.0, (19, 10), False).value == 0
    assert ratio(failed, few, 99.0, (10, 19), False).value == math.inf
    assert math.isnan(ratio(failed, failed, 99.0, (10, 10), True).value)


@pytest.mark.parametrize(("count", "slow"), [(7, 2), (11, 6), (17, 10)])
def test_blocks_that_differ_in_opposite_ways_have_a_ratio(count: int, slow: int) -> None:
    # Two blocks: where one server was slow, the other was fast. Their correlation is -1.
    values, number = np.arange(1.0, count + 1), np.arange(count)
    base = Samples(values, (number >= slow).astype(np.int64))
    other = Samples(values, (number < count - slow).astype(np.int64))
    found = ratio(base, other, 50, (2, 2), paired=True)
    assert found.low < found.value == 1 < found.high


def test_a_ratio_of_0_is_no_error() -> None:
    # Tokens of one read have one time stamp, so most gaps are 0 behind a proxy that buffers.
    some = Samples(np.arange(1.0, 101.0), np.arange(100) % 10)
    none = Samples(np.zeros(100), np.arange(100) % 10)
    mostly = Samples(np.array([0.0] * 48 + [1.0] * 52), np.arange(100) % 10)
    assert ratio(some, none, 50.0, (10, 10), True).value == math.inf
    assert ratio(none, some, 50.0, (10, 10), True) == Estimate(0.0, 0.0, 0.0)
    assert math.isnan(ratio(none, none, 50.0, (10, 10), True).value)
    # The median is 1, and its lower limit 0.
    estimate = ratio(mostly, some, 50.0, (10, 10), False)
    assert estimate.low == 0 < estimate.value < estimate.high
    assert ratio(some, mostly, 50.0, (10, 10), False).high == math.inf


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


def test_a_ratio_of_totals_has_the_error_that_blocks_share_taken_out() -> None:
    random = np.random.default_rng(1)
    units = random.uniform(5, 15, 12)
    half = ratio_of_totals((units / 2, units), (units, units), paired=True)
    assert (half.low, half.value, half.high) == pytest.approx((0.5, 0.5, 0.5))
    held = 0
    for _ in range(400):
        shared = random.lognormal(0, 0.3, 12)
        top, bottom = (shared * random.lognormal(0, 0.05, 12) * units for _ in range(2))
        paired = ratio_of_totals((top, units), (bottom, units), paired=True)
        apart = ratio_of_totals((top, units), (bottom, units), paired=False)
        assert paired.relative < apart.relative
        held += paired.low <= 1 <= paired.high
    assert 0.91 < held / 400 < 0.98
    none = ratio_of_totals((units * 0, units), (units, units), paired=True)
    assert none.high < 1
    assert ratio_of_totals((units[:1], units[:1]), (units[:1], units[:1]), True).high == math.inf


STARTS, BLOCKS, UNITS = np.repeat(np.arange(5), 4), np.repeat(np.arange(20), 50), np.ones(20)


def of_five_starts(number: str, seed: int, starts: Ints | None) -> Estimate:
    """1 % between five starts of four blocks each; requests vary by 2 %."""
    random = np.random.default_rng(seed)
    one, two = (np.exp(random.normal(0, 0.01, 5))[STARTS] for _ in range(2))
    first, second = (
        Samples(speed[BLOCKS] * np.exp(random.normal(0, 0.02, 1000)), BLOCKS)
        for speed in (one, two)
    )
    both = None if starts is None else (starts, starts)
    if number == "percentile":
        return percentile(first, 50.0, 20, starts)
    if number == "ratio":
        return ratio(first, second, 50.0, (20, 20), paired=True, starts=both)
    if number == "totals":
        return ratio_of_totals((one, UNITS), (two, UNITS), paired=True, starts=both)
    return rate(one, UNITS, starts)


@pytest.mark.parametrize("number", ["percentile", "ratio", "totals", "rate"])
def test_starts_that_differ_are_in_the_interval(number: str) -> None:
    def held(starts: Ints | None) -> float:
        found = [of_five_starts(number, seed, starts) for seed in range(300)]
        return float(np.mean([e.low <= 1 <= e.high for e in found]))

    assert held(STARTS) > 0.9
    assert held(None) < 0.9

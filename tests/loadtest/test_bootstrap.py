"""Percentiles are exact. Intervals cover the true value and widen with dependence in time."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.report.bootstrap import (
    Samples,
    block_numbers,
    block_weights,
    interval,
    mean_draws,
    percentile,
    percentile_draws,
)


@given(
    values=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=200),
    percent=st.sampled_from([1.0, 50.0, 90.0, 99.0, 100.0]),
)
def test_a_percentile_is_a_value_that_was_measured(values: list[float], percent: float) -> None:
    samples = Samples(np.array(values), np.zeros(len(values), dtype=np.int64))
    estimate = percentile(samples, percent, block_weights(1, draws=3))
    expected = np.percentile(values, percent, method="inverted_cdf")
    assert estimate.value == expected
    # One block: every resample is the sample.
    assert estimate.low == estimate.high == expected


def test_resamples_are_what_repeating_the_blocks_gives() -> None:
    rng = np.random.default_rng(0)
    samples = Samples(rng.random(500), rng.integers(0, 7, 500))
    weights = block_weights(7, draws=20)
    assert (weights.sum(axis=1) == 7).all()
    _, draws = percentile_draws(samples, 90.0, weights)
    _, means = mean_draws(samples, weights)
    for row, draw, mean in zip(weights, draws, means, strict=True):
        repeated = np.repeat(samples.values, row[samples.blocks])
        assert draw == np.percentile(repeated, 90, method="inverted_cdf")
        assert mean == pytest.approx(repeated.mean())


def test_intervals_cover_the_truth_as_often_as_they_say() -> None:
    # Neighbours are alike: values of a block share an offset of the size of their own noise.
    rng = np.random.default_rng(1)
    weights = block_weights(40, draws=200)
    blocks = np.repeat(np.arange(40), 25)
    covered = 0
    for _ in range(200):
        values = rng.normal(size=1000) + rng.normal(size=40)[blocks]
        estimate = percentile(Samples(values, blocks), 50.0, weights)
        covered += estimate.low <= 0 <= estimate.high
    assert 0.88 <= covered / 200 <= 1.0


def test_no_samples_give_no_number() -> None:
    nothing = Samples(np.array([]), np.array([], dtype=np.int64))
    estimate = percentile(nothing, 50.0, block_weights(3))
    assert np.isnan([estimate.value, estimate.low, estimate.high]).all()
    assert np.isnan(interval(*mean_draws(nothing, block_weights(3))).value)


def test_blocks_are_windows_of_time() -> None:
    numbers = block_numbers([5.0, 14.9, 15.0, 34.0], start=5.0, width=10.0, first=4)
    assert numbers.tolist() == [4, 4, 5, 6]

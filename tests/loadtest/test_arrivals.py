"""Arrivals have the requested burstiness."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtest.traffic.arrivals import Process, arrival_times, weibull_shape
from loadtest.traffic.scenario import PRESETS

processes = st.sampled_from(["gamma", "weibull"])


def constant(
    process: Process, cv: float, rate: float, seconds: float, seed: int
) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    rng = np.random.default_rng(seed)
    return arrival_times(process, cv, rate, seconds, rng)


@settings(max_examples=25)
@given(process=processes, cv=st.floats(0.1, 3.2), seed=st.integers(0, 2**32))
def test_gaps_have_the_coefficient_of_variation(process: Process, cv: float, seed: int) -> None:
    gaps = np.diff(constant(process, cv, 100, 10_000, seed))
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05)


@pytest.mark.parametrize("preset", list(PRESETS))
def test_presets_have_their_burstiness(preset: str) -> None:
    process, cv = PRESETS[preset]
    gaps = np.diff(constant(process, cv, 100, 30_000, seed=1))
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05, abs=1e-9)


@settings(max_examples=50)
@given(process=processes, cv=st.floats(0, 8), seed=st.integers(0, 2**32))
def test_arrivals_ascend_within_the_run_and_repeat(process: Process, cv: float, seed: int) -> None:
    times = constant(process, cv, 20, 30, seed)
    assert np.all(np.diff(times) >= 0)
    assert np.all((times >= 0) & (times < 30))
    np.testing.assert_array_equal(times, constant(process, cv, 20, 30, seed))


@pytest.mark.parametrize("process", ["gamma", "weibull"])
@pytest.mark.parametrize(("cv", "runs"), [(0.5, 500), (1.0, 500), (3.0, 4000)])
def test_the_expected_count_is_rate_times_duration(process: Process, cv: float, runs: int) -> None:
    # A renewal process that starts with an ordinary gap has (cv^2 - 1) / 2 arrivals too many:
    # 4 of 50 at cv 3. The standard error here is below 0.4.
    counts = [len(constant(process, cv, 5, 10, seed)) for seed in range(runs)]
    assert np.mean(counts) == pytest.approx(50, abs=1.5)


@pytest.mark.parametrize("cv", [0.2, 0.9, 1.0, 1.1, 3.2, 8.0])
def test_weibull_shape_inverts_the_coefficient_of_variation(cv: float) -> None:
    sample = np.random.default_rng(0).weibull(weibull_shape(cv), 4_000_000)
    assert sample.std() / sample.mean() == pytest.approx(cv, rel=0.05)

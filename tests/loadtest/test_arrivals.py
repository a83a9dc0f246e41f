"""Arrivals have the requested burstiness and follow the rate curve."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from loadtest.traffic.arrivals import Process, arrival_times, weibull_shape
from loadtest.traffic.rate_curves import RateCurve, rate_cells
from loadtest.traffic.scenario import PRESETS

processes = st.sampled_from(["gamma", "weibull"])


def constant(
    process: Process, cv: float, rate: float, seconds: float, seed: int
) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    rng = np.random.default_rng(seed)
    return arrival_times(process, cv, rate, np.array([0.0, seconds]), np.array([1.0]), rng)


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


@pytest.mark.parametrize(
    ("curve", "expected"),
    [
        ({"kind": "constant"}, [1, 1, 1, 1]),
        ({"kind": "ramp", "start": 0, "end": 2}, [0.25, 0.75, 1.25, 1.75]),
        ({"kind": "spike", "factor": 5, "at": 0.25, "width": 0.25}, [0.5, 2.5, 0.5, 0.5]),
        ({"kind": "diurnal", "peak": 1.5, "period": 1000}, [0.68, 1.32, 1.32, 0.68]),
    ],
)
def test_arrivals_follow_the_curve(curve: dict[str, Any], expected: list[float]) -> None:
    parsed = TypeAdapter(RateCurve).validate_python(curve)
    rng = np.random.default_rng(3)
    edges, factors = rate_cells(parsed, 1000.0, rng)
    times = arrival_times("gamma", 1.0, 100, edges, factors, rng)
    counts, _ = np.histogram(times, bins=4, range=(0, 1000))
    np.testing.assert_allclose(counts / 25_000, expected, atol=0.04)


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32))
def test_nothing_arrives_in_the_silences(seed: int) -> None:
    parsed = TypeAdapter(RateCurve).validate_python({"kind": "on-off", "busy": 5, "silent": 5})
    rng = np.random.default_rng(seed)
    edges, factors = rate_cells(parsed, 60.0, rng)
    times = arrival_times("gamma", 1.0, 50, edges, factors, rng)
    cell = np.searchsorted(edges, times, side="left") - 1
    assert np.all(factors[np.clip(cell, 0, None)] > 0)
    assert np.sum(np.diff(edges) * factors) == pytest.approx(60.0)

"""The sampled lengths have the quantiles of the traces."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtest.errors import LoadTestError
from loadtest.traffic.lengths import length_table, length_tables, sample_lengths

MARGINALS = [(name, side) for name in length_tables() for side in ("input", "output")]


@pytest.mark.parametrize(("name", "side"), MARGINALS)
@settings(max_examples=10)
@given(seed=st.integers(0, 2**32))
def test_samples_match_every_quantile_of_the_trace(name: str, side: str, seed: int) -> None:
    # quantile(p) = v says of the trace exactly that F(v) >= p and F(v - 1) <= p, ties included.
    # So these bounds are the Kolmogorov-Smirnov distance to all that is known of the trace.
    table = length_table(name)
    quantiles = getattr(table, side)
    drawn = sample_lengths(table.probabilities, quantiles, 10_000, np.random.default_rng(seed))
    for p, value in zip(table.probabilities, quantiles, strict=True):
        assert np.mean(drawn <= value) >= p - 0.04
        assert np.mean(drawn < value) <= p + 0.04


@pytest.mark.parametrize(
    ("name", "side", "mean", "tolerance"),
    [  # measured on the raw traces; 24 quantiles say little about the tail of code answers
        ("azure-conversation", "input", 1154.7, 0.03),
        ("azure-conversation", "output", 211.1, 0.03),
        ("azure-code", "input", 2047.8, 0.03),
        ("azure-code", "output", 27.9, 0.09),
        ("mooncake-conversation", "input", 12035, 0.03),
        ("mooncake-conversation", "output", 342.6, 0.03),
    ],
)
def test_means_are_those_of_the_raw_traces(
    name: str, side: str, mean: float, tolerance: float
) -> None:
    table = length_table(name)
    rng = np.random.default_rng(0)
    drawn = sample_lengths(table.probabilities, getattr(table, side), 400_000, rng)
    assert drawn.mean() == pytest.approx(mean, rel=tolerance)


@pytest.mark.parametrize("name", list(length_tables()))
def test_tables_are_quantiles_and_attributed(name: str) -> None:
    table = length_table(name)
    assert (table.probabilities[0], table.probabilities[-1]) == (0, 1)
    assert list(table.probabilities) == sorted(set(table.probabilities))
    for quantiles in (table.input, table.output):
        assert len(quantiles) == len(table.probabilities)
        assert list(quantiles) == sorted(quantiles)
        assert quantiles[0] >= 1
    assert "http" in table.attribution
    assert "CC-BY" in table.attribution or "Apache" in table.attribution


def test_an_unknown_table_names_those_there_are() -> None:
    with pytest.raises(LoadTestError, match=r"'azure'.*azure-code, azure-conversation"):
        length_table("azure")

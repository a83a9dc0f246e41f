"""The loss of truncated factors is optimal, and equals its prediction."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_gac.compression.methods.factorization import factorize
from vllm_gac.compression.methods.lowrank import balanced


def problem(rows: int, columns: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A weight and the covariance of inputs that vary over two decades."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    mix = torch.randn(columns, columns, generator=generator, dtype=torch.float64)
    mix = mix * torch.logspace(0, -2, columns, dtype=torch.float64)
    return weight, mix @ mix.T


def loss(
    weight: torch.Tensor,
    low: torch.Tensor,
    covariance: torch.Tensor,
    metric: torch.Tensor | None = None,
) -> float:
    """E e^T M e for e = (W - low) x; without a metric M, E|e|^2."""
    difference = weight - low
    errors = difference @ covariance @ difference.T
    return float(torch.trace(errors if metric is None else metric @ errors))


@settings(max_examples=25)
@given(st.integers(2, 30), st.integers(2, 30), st.data(), st.integers(0, 99))
def test_the_loss_is_what_the_dropped_singular_values_say(
    rows: int, columns: int, data: st.DataObject, seed: int
) -> None:
    weight, covariance = problem(rows, columns, seed)
    rank = data.draw(st.integers(1, min(rows, columns)))
    metric = data.draw(st.sampled_from([None, problem(2, rows, seed + 1)[1]]))
    pulled = data.draw(st.booleans())
    factors = factorize(weight, covariance, **weighting(weight, metric, pulled))
    up, down = factors.truncate(rank)
    predicted = float(factors.singular_values[rank:].square().sum())
    whole = loss(weight, torch.zeros_like(weight), covariance, metric)
    assert loss(weight, up @ down, covariance, metric) == pytest.approx(predicted, abs=1e-6 * whole)


def weighting(
    weight: torch.Tensor, metric: torch.Tensor | None, pulled: bool
) -> dict[str, torch.Tensor]:
    """The metric of the output as an argument, at the output or pulled to the input."""
    if metric is None:
        return {}
    if pulled:
        return {"pulled_metric": weight.T @ metric @ weight}
    return {"output_metric": metric}


@settings(max_examples=15)
@given(st.integers(4, 20), st.integers(4, 20), st.booleans(), st.integers(0, 99))
def test_no_factors_lose_less_in_the_metrics_they_are_made_for(
    rows: int, columns: int, pulled: bool, seed: int
) -> None:
    weight, covariance = problem(rows, columns, seed)
    metric, rank = problem(2, rows, seed + 1)[1], min(rows, columns) // 2
    own = factorize(weight, covariance, **weighting(weight, metric, pulled)).truncate(rank)
    best = loss(weight, own[0] @ own[1], covariance, metric)
    whole = loss(weight, torch.zeros_like(weight), covariance, metric)
    u, s, vt = torch.linalg.svd(weight)
    plain = u[:, :rank] * s[:rank] @ vt[:rank]
    up, down = factorize(weight, covariance).truncate(rank)
    for other in (up @ down, plain):
        assert best <= loss(weight, other, covariance, metric) + 1e-6 * whole
    assert loss(weight, up @ down, covariance) <= loss(weight, plain, covariance) + 1e-6 * whole


@pytest.mark.parametrize("inputs", [3, 0])
def test_degenerate_inputs_leave_finite_factors(inputs: int) -> None:
    weight = torch.randn(6, 8, generator=torch.manual_seed(0), dtype=torch.float64)
    samples = torch.randn(8, inputs, dtype=torch.float64)
    covariance = samples @ samples.T
    for rank in (2, 6):
        a, b = balanced(factorize(weight, covariance), rank)
        assert bool(a.isfinite().all() and b.isfinite().all())
    torch.testing.assert_close((b @ a) @ samples, weight @ samples)

"""Covariances of few tokens are shrunk: that helps where tokens are few, and harms nowhere."""

import pytest
import torch

from vllm_gac.compression.measured import shrink_covariances
from vllm_gac.compression.methods.prune import prune_channels, prune_order
from vllm_gac.compression.methods.statistics import NORMED_KEYS
from vllm_gac.compression.moments import second_moment, shrunk, toward_diagonal


@pytest.mark.parametrize("features", [3, 512, 1031])
def test_halves_give_the_whole_second_moment(features: int) -> None:
    rows = torch.randn(7, features, dtype=torch.float64)
    torch.testing.assert_close(second_moment(rows), rows.T @ rows)


@pytest.mark.parametrize("samples", [1, 5, 200, 100_000])
def test_the_fewer_the_samples_the_closer_to_the_target(samples: int) -> None:
    generator = torch.Generator().manual_seed(samples)
    spread = torch.logspace(0, -1, 12, dtype=torch.float64)
    truth = torch.diag(spread.square())
    rows = torch.randn(samples, 12, generator=generator, dtype=torch.float64) * spread
    moment = rows.T @ rows / samples
    shrunken = shrunk(moment, samples)
    assert float(shrunken.trace()) == pytest.approx(float(moment.trace()))
    assert float((shrunken - truth).norm()) <= 1.01 * float((moment - truth).norm())
    assert float(torch.linalg.eigvalsh(shrunken)[0]) > 0
    if samples == 100_000:
        torch.testing.assert_close(shrunken, moment, rtol=1e-2, atol=1e-3)


def channels(samples: int, seed: int) -> torch.Tensor:
    """Correlated channels of different size, [samples, 64]."""
    generator = torch.Generator().manual_seed(seed)
    random = torch.Generator().manual_seed(99)
    falling = torch.arange(1, 65, dtype=torch.float64) ** -0.5
    mix = torch.linalg.qr(torch.randn(64, 64, generator=random, dtype=torch.float64))[0]
    sizes = torch.logspace(0, -1, 64, dtype=torch.float64)
    rows = torch.randn(samples, 64, generator=generator, dtype=torch.float64)
    return rows @ (mix * falling.sqrt()).T * sizes


def left(covariance: torch.Tensor) -> float:
    """The error on unseen tokens of an MLP that is pruned to 70 % with this covariance."""
    down = torch.randn(24, 64, generator=torch.Generator().manual_seed(1)).double()
    gate, unseen = torch.zeros(64, 4).double(), channels(5000, 77)
    gone, _ = prune_order(down, covariance, down.shape[1] - 45)
    _, _, smaller, kept = prune_channels(gate, gate, down, covariance, gone)
    return float((unseen @ down.T - unseen[:, kept] @ smaller.T).square().mean())


@pytest.mark.parametrize(
    ("per_channel", "at_most"), [(1, 0.7), (2.5, 0.95), (9, 1.01), (64, 1.005)]
)
def test_fits_of_few_tokens_hold_for_others(per_channel: float, at_most: float) -> None:
    ratios = []
    for seed in range(4):
        rows = channels(int(64 * per_channel), seed)
        covariance = rows.T @ rows / len(rows)
        ratios.append(left(toward_diagonal(covariance, len(rows))) / left(covariance))
    assert sum(ratios) / 4 < at_most


def test_variances_stay_and_what_was_not_seen_is_possible() -> None:
    rows = channels(20, 0)
    covariance = rows.T @ rows / 20
    shrunken = toward_diagonal(covariance, 20)
    assert torch.equal(shrunken.diagonal(), covariance.diagonal())
    assert float(torch.linalg.eigvalsh(shrunken)[0]) > 1e-4 * float(covariance.diagonal().max())
    diagonal = torch.diag(covariance.diagonal())
    torch.testing.assert_close(toward_diagonal(diagonal, 20), diagonal)
    silent = torch.zeros(4, 4).double()
    silent[1, 1] = 2
    assert torch.equal(toward_diagonal(silent, 9), silent)
    _, costs = prune_order(torch.zeros(3, 4), toward_diagonal(0 * silent, 9), 2)
    assert not costs.any()


def test_only_covariances_are_shrunk() -> None:
    rows = channels(20, 0)
    moment = rows.T @ rows / 20
    stats = dict.fromkeys(("mlp.down_proj", "metric.mlp.down_proj"), moment)
    shrunken = shrink_covariances({**stats, NORMED_KEYS: moment}, 20)
    assert torch.equal(shrunken["mlp.down_proj"], toward_diagonal(moment, 20))
    assert shrunken["metric.mlp.down_proj"] is moment
    assert shrunken[NORMED_KEYS] is moment

"""MLP channels: superfluous ones are removed, and the refit minimizes the squared error."""

import torch

from vllm_gac.compression.methods.prune import prune_channels, prune_order

GENERATOR = torch.Generator().manual_seed(0)
WIDTH, HIDDEN = 24, 10
DOWN = torch.randn(HIDDEN, WIDTH, generator=GENERATOR, dtype=torch.float64)
SAMPLES = torch.randn(400, WIDTH, generator=GENERATOR, dtype=torch.float64)
GATE, UP = torch.randn(2, WIDTH, HIDDEN, generator=GENERATOR, dtype=torch.float64)


def covariance(samples: torch.Tensor) -> torch.Tensor:
    return samples.T @ samples / len(samples)


def test_copies_of_other_channels_go_first_and_at_no_loss() -> None:
    samples = SAMPLES.clone()
    samples[:, 5], samples[:, 17] = 2 * samples[:, 3], samples[:, 8] - samples[:, 20]
    statistics = covariance(samples)
    gone = prune_order(DOWN, statistics, 2)[0]
    _, _, down, kept = prune_channels(GATE, UP, DOWN, statistics, gone)
    dense, small = samples @ DOWN.T, samples[:, kept] @ down.T
    assert (dense - small).square().mean() < 1e-5 * dense.square().mean()


def test_the_others_stay_and_down_is_refitted_by_least_squares() -> None:
    mixed = SAMPLES @ torch.randn(WIDTH, WIDTH, generator=GENERATOR, dtype=torch.float64)
    gone = torch.tensor([3, 1, 20, 6, 7])
    gate, up, down, kept = prune_channels(GATE, UP, DOWN, covariance(mixed), gone)
    assert (~kept).nonzero().flatten().tolist() == sorted(gone.tolist())
    assert torch.equal(gate, GATE[kept])
    assert torch.equal(up, UP[kept])
    best = torch.linalg.lstsq(mixed[:, kept], mixed @ DOWN.T).solution.T
    torch.testing.assert_close(down, best, rtol=0, atol=5e-3)


def test_greedy_removal_costs_little_more_than_the_best_pair_to_remove() -> None:
    mixed = SAMPLES @ torch.randn(WIDTH, WIDTH, generator=GENERATOR, dtype=torch.float64)
    statistics = covariance(mixed)

    def cost(removed: tuple[int, ...]) -> float:
        kept = [i for i in range(WIDTH) if i not in removed]
        refit = torch.linalg.solve(statistics[kept][:, kept], statistics[kept] @ DOWN.T).T
        return float((mixed @ DOWN.T - mixed[:, kept] @ refit.T).square().sum())

    pairs = [(i, j) for i in range(WIDTH) for j in range(i)]
    greedy = tuple(prune_order(DOWN, statistics, 2)[0].tolist())
    assert cost(greedy) <= 1.1 * min(cost(pair) for pair in pairs)


def test_a_shorter_order_is_the_start_of_a_longer_one() -> None:
    statistics = covariance(SAMPLES)
    assert (
        prune_order(DOWN, statistics, 20)[0][:7].tolist()
        == prune_order(DOWN, statistics, 7)[0].tolist()
    )

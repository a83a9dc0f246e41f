"""What intervals and searches say of samples that are drawn: starts that differ, and capacities."""

from collections.abc import Sequence

import numpy as np

from loadtest.report.capacity import AtRate, capacity
from loadtest.report.intervals import Ints, Samples, percentile, ratio

_BLOCKS, _REQUESTS = 4, 50  # of a start, of a block


def held(
    spread: float, starts: int, seeds: Sequence[int], known: bool
) -> tuple[float, float, float]:
    """How often the intervals of p50 and of its speedup hold 1, and the speedup's half width.

    Two servers are the same: each start of one is faster or slower by chance, and so is each
    request, by 2 %. So a speedup that is told apart is told wrongly.

    Args:
        spread: the standard deviation between starts, as a fraction.
        starts: of each server.
        seeds: one for each experiment.
        known: whether the intervals know which block is of which start.
    """
    own, speedups, widths = [], [], []
    blocks = starts * _BLOCKS
    of_start: Ints = np.repeat(np.arange(starts), _BLOCKS)
    numbers = np.repeat(np.arange(blocks), _REQUESTS)
    for seed in seeds:
        random = np.random.default_rng(seed)
        one, two = (
            Samples(
                np.exp(
                    random.normal(0, spread, starts)[of_start][numbers]
                    + random.normal(0, 0.02, len(numbers))
                ),
                numbers,
            )
            for _ in range(2)
        )
        found = percentile(one, 50.0, blocks, of_start if known else None)
        both = (of_start, of_start) if known else None
        versus = ratio(one, two, 50.0, (blocks, blocks), paired=True, starts=both)
        own.append(found.low <= 1 <= found.high)
        speedups.append(versus.low <= 1 <= versus.high)
        widths.append(versus.relative)
    return float(np.mean(own)), float(np.mean(speedups)), float(np.median(widths))


def searched(true: float, steps: int, seed: int) -> tuple[float, float]:
    """The limits after a search of `steps` steps of a minute for the capacity `true`.

    1 % of the requests are bad at the capacity, and 45 % at 1.1 times.
    """
    random = np.random.default_rng(seed)
    rows = [_tested(random, start * true, true) for start in (0.6, 1.7)]
    for _ in range(steps):
        rows.append(_tested(random, capacity("", "", rows).next_rate, true))
    found = capacity("", "", rows).rate
    return found.low, found.high


def _tested(random: np.random.Generator, rate: float, true: float) -> AtRate:
    seconds, blocks = 60.0, 3
    count = max(int(random.poisson(rate * seconds)), 1)
    bad = min(0.01 * (rate / true) ** 40, 1.0)
    numbers = np.sort(random.integers(0, blocks, count))
    kept = (random.random(count) >= bad).astype(np.float64)
    return AtRate(rate, Samples(kept, numbers), blocks, seconds)

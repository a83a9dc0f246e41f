"""One model's perplexity over another's, with an interval by a paired bootstrap."""

import math
from collections.abc import Sequence

import numpy as np

RESAMPLES, _SEED = 2000, 0


def ratio(
    losses: Sequence[float],
    others: Sequence[float],
    group: Sequence[int],
    tokens: Sequence[int] | None = None,
) -> tuple[float, float, float]:
    """exp of the mean difference of two models' losses of the same windows, and its 95 % interval.

    Windows of one group are drawn together, because what they lose is alike (Efron and
    Tibshirani 1993, chapter 8: the unit that is drawn is the one that is independent). Few groups
    make a bootstrap's interval too narrow; it is widened as Student's t is (Hesterberg 2015).

    Args:
        losses: Nats of each window: per token, or summed over `tokens`.
        others: The same of the model to compare with.
        group: The document of each window, or the stretch of text that it is in; from 0 on.
        tokens: The predicted tokens of each window. None: losses are per token, and all windows
            have as many.

    Returns:
        The ratio, and the ends of its interval.
    """
    differences = np.asarray(losses) - np.asarray(others)
    sums, counts = np.bincount(group, differences), np.bincount(group, tokens)
    rng = np.random.default_rng(_SEED)
    drawn = rng.integers(len(sums), size=(RESAMPLES, len(sums)))
    mean = differences.sum() / counts.sum()
    away = np.percentile(sums[drawn].sum(1) / counts[drawn].sum(1) - mean, [2.5, 97.5])
    low, high = np.exp(mean + _widened(len(sums)) * away)
    return float(np.exp(mean)), float(low), float(high)


def _widened(groups: int) -> float:
    """By how much an interval of few groups is wider than a normal distribution's.

    Student's t over the normal's 1.96, by the series of Abramowitz and Stegun, 26.7.5; and what a
    variance lacks that is over n instead of n - 1.
    """
    z: float = 1.96
    freedom = max(groups - 1, 1)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    t = z + sum(term / freedom**power for power, term in enumerate(terms, 1))
    return float(t / z * math.sqrt(groups / freedom))

"""One model's perplexity over another's, with an interval by a paired bootstrap."""

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
    Tibshirani 1993, chapter 8: the unit that is drawn is the one that is independent).

    Args:
        losses: Nats of each window: per token, or summed over `tokens`.
        others: The same of the model to compare with.
        group: The document of each window, or the stretch of text that it is in; from 0 on.
        tokens: The predicted tokens of each window. None: losses are per token, and all windows
            have as many.

    Returns:
        The ratio, and the 2.5th and 97.5th percentile of those of the resampled groups.
    """
    differences = np.asarray(losses) - np.asarray(others)
    sums, counts = np.bincount(group, differences), np.bincount(group, tokens)
    rng = np.random.default_rng(_SEED)
    drawn = rng.integers(len(sums), size=(RESAMPLES, len(sums)))
    means = sums[drawn].sum(1) / counts[drawn].sum(1)
    low, high = np.exp(np.percentile(means, [2.5, 97.5]))
    return float(np.exp(differences.sum() / counts.sum())), float(low), float(high)


def shown(middle: float, low: float, high: float) -> str:
    """A ratio and its interval, as tables have them."""
    return f"{middle:.4f} ({low:.4f} to {high:.4f})"

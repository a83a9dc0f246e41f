"""Perplexity over the dense model's, with an interval: a paired bootstrap over documents."""

from collections.abc import Sequence

import numpy as np

RESAMPLES, _SEED = 2000, 0


def ratio(
    losses: Sequence[float], dense: Sequence[float], document: Sequence[int]
) -> tuple[float, float, float]:
    """exp of the mean difference of two models' losses of the same windows, and its 95 % interval.

    Windows of one document are drawn together, because what they lose is alike (Efron and
    Tibshirani 1993, chapter 8: the unit that is drawn is the one that is independent).

    Args:
        losses: Mean nats per token of each window.
        dense: The same of the model to compare with.
        document: The document of each window.

    Returns:
        The ratio, and the 2.5th and 97.5th percentile of those of the resampled documents.
    """
    differences = np.asarray(losses) - np.asarray(dense)
    documents = np.asarray(document)
    sums = np.bincount(documents, differences)
    counts = np.bincount(documents)
    rng = np.random.default_rng(_SEED)
    drawn = rng.integers(len(sums), size=(RESAMPLES, len(sums)))
    means = sums[drawn].sum(1) / counts[drawn].sum(1)
    low, high = np.exp(np.percentile(means, [2.5, 97.5]))
    return float(np.exp(differences.mean())), float(low), float(high)


def shown(middle: float, low: float, high: float) -> str:
    """A ratio and its interval, as tables have them."""
    return f"{middle:.4f} ({low:.4f} to {high:.4f})"

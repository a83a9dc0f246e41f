"""Percentiles of latencies with block-bootstrap confidence intervals.

Requests of the same seconds share a queue and a batch, so they are not independent. To resample
single requests would make intervals several times too narrow. Instead, whole blocks of time are
resampled (Kunsch, 1989). A resample is a set of weights on the sorted values, so half a million
inter-token latencies are sorted only once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
_LEVEL = 0.95


@dataclass(frozen=True, slots=True)
class Estimate:
    """A number and its 95 % confidence interval. All are NaN without any values."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Samples:
    """Values of one measure, each with the number (from 0) of its block of time."""

    values: Floats
    blocks: Ints


def block_weights(blocks: int, draws: int = 400, seed: int = 0) -> Ints:
    """How often each resample takes each block [draws, blocks]."""
    rng = np.random.default_rng(seed)
    return rng.multinomial(blocks, np.full(blocks, 1 / blocks), size=draws)


def percentile(samples: Samples, percent: float, weights: Ints) -> Estimate:
    """The smallest value that at least `percent` % of the samples do not exceed."""
    return interval(*percentile_draws(samples, percent, weights))


def percentile_draws(samples: Samples, percent: float, weights: Ints) -> tuple[float, Floats]:
    """The percentile of the samples, and that of every resample [draws]."""
    if not len(samples.values):
        return np.nan, np.full(len(weights), np.nan)
    order = np.argsort(samples.values, kind="stable")
    values, blocks = samples.values[order], samples.blocks[order]
    draws = [_weighted(values, row[blocks], percent) for row in weights]
    return _weighted(values, np.ones_like(blocks), percent), np.array(draws)


def mean_draws(samples: Samples, weights: Ints) -> tuple[float, Floats]:
    """The mean of the samples, and that of every resample [draws]."""
    if not len(samples.values):
        return np.nan, np.full(len(weights), np.nan)
    width = weights.shape[1]
    sums = weights @ np.bincount(samples.blocks, samples.values, width)
    counts = weights @ np.bincount(samples.blocks, minlength=width)
    with np.errstate(invalid="ignore"):
        return float(samples.values.mean()), sums / counts


def interval(value: float, draws: Floats) -> Estimate:
    """An estimate from the statistic and its resamples, by the percentile method."""
    draws = draws[np.isfinite(draws)]
    if not len(draws):
        return Estimate(value, np.nan, np.nan)
    tail = 50 * (1 - _LEVEL)
    low, high = np.percentile(draws, [tail, 100 - tail])
    return Estimate(value, float(low), float(high))


def block_numbers(times: Sequence[float], start: float, width: float, first: int) -> Ints:
    """The block of each time. Blocks of `width` seconds begin at `start` and count from `first`."""
    offsets = (np.asarray(times, dtype=np.float64) - start) / width
    return first + np.floor(offsets).astype(np.int64)


def _weighted(values: Floats, weights: Ints, percent: float) -> float:
    cumulative = np.cumsum(weights)
    if cumulative[-1] == 0:
        return np.nan
    rank = max(int(np.ceil(percent / 100 * cumulative[-1] - 1e-9)), 1)
    return float(values[np.searchsorted(cumulative, rank)])

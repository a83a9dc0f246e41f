"""Losses of other models, for plans without statistics of the model at hand.

The tables of methods hold losses in nats per token (logarithms of perplexity ratios) at shares of a
layer's dims. Each part was compressed alone, in every layer. They are means of two small Llamas
with eight query heads and four KV heads of 128: the demo model, and one of 28 M parameters. A plan
uses the order and the curvature of these losses; the amounts belong to other models.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vllm_gac.compression.methods.base import Curve

# The shares of the dense dim that tables have losses at.
_SHARES = (0.0, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0)
# By share of the MLP's channels.
WIDTHS = (3.0, 0.90, 0.60, 0.40, 0.23, 0.125, 0.050, 0.0)


def prior_curve(losses: Sequence[float], full: int) -> Curve:
    """The losses [full + 1] at a dim of 0, 1, ..., full, if every layer has this dim."""
    return curve_through(losses, np.arange(full + 1) / full)


def curve_through(losses: Sequence[float], shares: NDArray[np.float64]) -> Curve:
    """A strictly convex curve through a table, at rising `shares`. The last share is 1.

    With straight lines between the points, many plans would be equally good, and equal layers
    would get different dims. So the slope is interpolated instead. The slope of each line holds in
    the middle of the line, and the slope is 0 at a share of 1.
    """
    points = np.array(_SHARES)
    middles = (points[1:] + points[:-1]) / 2
    slopes = -np.diff(losses) / np.diff(points)
    slope = np.interp(shares, [*middles, 1.0], [*slopes, 0.0])
    steps = np.diff(shares) * (slope[1:] + slope[:-1]) / 2
    curve: Curve = np.append(np.cumsum(steps[::-1])[::-1], 0.0)
    return curve

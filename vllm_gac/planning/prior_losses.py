"""What compression loses, for plans without statistics of the model at hand.

The tables hold losses in nats per token (logarithms of perplexity ratios) at shares of a layer's
dims. Each part was compressed alone, in every layer. They are means of two small Llamas with eight
query heads and four KV heads of 128: the demo model, and one of 28 M parameters. A plan uses the
order and the curvature of these losses; the amounts belong to other models.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vllm_gac.layout.dims import ModelLayout, breakeven_rank
from vllm_gac.planning.losses import Curve

_SHARES = (0.0, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0)
# By (form, number of heads that become one) and share of the dense key elements.
_KEYS = {
    ("rotary", 1): (2.0, 0.49, 0.27, 0.146, 0.069, 0.020, 0.002, 0.0),
    ("rotary", 2): (2.0, 0.43, 0.22, 0.120, 0.052, 0.024, 0.004, 0.0),
    ("latent", 1): (2.0, 0.070, 0.022, 0.0085, 0.0040, 0.0020, 0.0004, 0.0),
    ("latent", 2): (2.0, 0.022, 0.0070, 0.0032, 0.0014, 0.0006, 0.0001, 0.0),
}
# By number of heads that become one and share of the dense value elements.
_VALUES = {
    1: (2.0, 0.21, 0.086, 0.036, 0.016, 0.0070, 0.0020, 0.0),
    2: (2.0, 0.065, 0.022, 0.0097, 0.0050, 0.0022, 0.0006, 0.0),
}
# By share of the MLP's channels.
_WIDTHS = (3.0, 0.90, 0.60, 0.40, 0.23, 0.125, 0.050, 0.0)
# A linear whose factors keep a share of its parameters loses this fraction of the width's loss.
_FACTORIZED = {"mlp": 0.7 / 3, "self_attn": 0.17 / 4}


class PriorLosses:
    """The losses of other models, for a dense model without statistics.

    Every layer has the same curves. The losses of all layers add up to that of the model.
    """

    def __init__(self, dense: ModelLayout) -> None:
        """Make the curves for the dims of `dense`."""
        size, count = dense.head_dim, len(dense.layers)
        self._keys = {
            (form, group): _curve(losses, group * size) / count
            for (form, group), losses in _KEYS.items()
        }
        self._values = {
            group: _curve(losses, group * size) / count for group, losses in _VALUES.items()
        }
        self._width = _curve(_WIDTHS, dense.layers[0].intermediate_size) / count
        self._dense = dense
        self._ranks: dict[str, Curve] = {}  # made on demand, because most plans have no ranks

    def key(self, layer: int, form: str, group: int) -> Curve:
        """By the size of a key head."""
        return self._keys[form, group]

    def value(self, layer: int, group: int) -> Curve:
        """By the size of a value head."""
        return self._values[group]

    def width(self, layer: int) -> Curve:
        """By the MLP's width."""
        return self._width

    def rank(self, layer: int, linear: str) -> Curve:
        """By the rank of a linear. A rank that saves no parameters loses nothing."""
        if linear not in self._ranks:
            self._ranks[linear] = _rank_curve(self._dense, linear) / len(self._dense.layers)
        return self._ranks[linear]


def _curve(losses: Sequence[float], full: int) -> Curve:
    """The losses [full + 1] at a dim of 0, 1, ..., full, if every layer has this dim."""
    return _smooth(losses, np.arange(full + 1) / full)


def _rank_curve(dense: ModelLayout, linear: str) -> Curve:
    """The losses [full + 1] at a rank of 0, 1, ..., full, if every layer has this rank."""
    own = dense.layers[0]
    ranks = np.arange(min(dense.linear_shape(own, linear)) + 1)
    kept = np.minimum(ranks / breakeven_rank(dense, own, linear), 1.0)
    return _FACTORIZED[linear.split(".")[0]] * _smooth(_WIDTHS, kept)


def _smooth(losses: Sequence[float], shares: NDArray[np.float64]) -> Curve:
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

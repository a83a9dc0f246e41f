"""What compression loses, for plans without statistics of the model at hand.

The tables hold losses in nats per token (logarithms of perplexity ratios) at shares of a layer's
dims. Each part was compressed alone, in every layer. They are means of two small Llamas with eight
query heads and four KV heads of 128: the demo model, and one of 28 M parameters. A plan uses the
order and the curvature of these losses; the amounts belong to other models.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vllm_gac.layout.dims import LINEARS, ModelLayout, breakeven_rank
from vllm_gac.layout.schema import METHODS
from vllm_gac.planning.losses import Curve, Losses

_SHARES = (0.0, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0)
# By form, number of heads that become one, and share of the dense elements.
_HEADS = {
    "rotary1": (2.0, 0.49, 0.27, 0.146, 0.069, 0.020, 0.002, 0.0),
    "rotary2": (2.0, 0.43, 0.22, 0.120, 0.052, 0.024, 0.004, 0.0),
    "latent1": (2.0, 0.070, 0.022, 0.0085, 0.0040, 0.0020, 0.0004, 0.0),
    "latent2": (2.0, 0.022, 0.0070, 0.0032, 0.0014, 0.0006, 0.0001, 0.0),
    "value1": (2.0, 0.21, 0.086, 0.036, 0.016, 0.0070, 0.0020, 0.0),
    "value2": (2.0, 0.065, 0.022, 0.0097, 0.0050, 0.0022, 0.0006, 0.0),
}
# By share of the MLP's channels.
_WIDTHS = (3.0, 0.90, 0.60, 0.40, 0.23, 0.125, 0.050, 0.0)
# A linear whose factors keep a share of its parameters loses this fraction of the width's loss.
_FACTORIZED = {"mlp": 0.7 / 3, "self_attn": 0.17 / 4}


def prior_losses(dense: ModelLayout, methods: Sequence[str] = METHODS) -> Losses:
    """The losses of other models, for a dense model without statistics.

    Every layer has the same curves. The losses of all layers add up to that of the model. Those of
    ranks are made for the method lowrank only: they are the longest.
    """
    size, count = dense.head_dim, len(dense.layers)
    curves = {name: _curve(table, int(name[-1]) * size) for name, table in _HEADS.items()}
    curves["width"] = _curve(_WIDTHS, dense.layers[0].intermediate_size)
    if "lowrank" in methods:
        curves |= {f"rank.{linear}": _rank_curve(dense, linear) for linear in LINEARS}
    return [{name: curve / count for name, curve in curves.items()}] * count


def _curve(losses: Sequence[float], full: int) -> Curve:
    """The losses [full + 1] at a dim of 0, 1, ..., full, if every layer has this dim."""
    return _smooth(losses, np.arange(full + 1) / full)


def _rank_curve(dense: ModelLayout, linear: str) -> Curve:
    """The losses [full + 1] at a rank of 0, 1, ..., full, if every layer has this rank.

    A rank that saves no parameters loses nothing.
    """
    dense_layer = dense.layers[0]
    ranks = np.arange(min(dense.linear_shape(dense_layer, linear)) + 1)
    kept = np.minimum(ranks / breakeven_rank(dense, dense_layer, linear), 1.0)
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

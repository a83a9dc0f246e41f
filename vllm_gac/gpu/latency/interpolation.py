"""Straight lines between measured points."""

from bisect import bisect_left
from collections.abc import Sequence


def between(xs: Sequence[float], x: float) -> tuple[int, int, float]:
    """The indices of the neighbours of `x` in ascending `xs`, and the weight of the second one.

    Beyond an end, both are the index of that end.
    """
    upper = bisect_left(xs, x)
    if upper in (0, len(xs)):
        end = min(upper, len(xs) - 1)
        return end, end, 0.0
    return upper - 1, upper, (x - xs[upper - 1]) / (xs[upper] - xs[upper - 1])


def interpolate(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """The value at `x`: linear between the points, constant beyond the ends."""
    low, high, weight = between(xs, x)
    return (1 - weight) * ys[low] + weight * ys[high]


def extrapolate(xs: Sequence[float], ys: Sequence[float], x: float) -> float:
    """The value at `x`: linear between and above the points, constant below the first one.

    Above the last one it does not fall.
    """
    if x <= xs[-1] or len(xs) == 1:
        return interpolate(xs, ys, x)
    return ys[-1] + max(0.0, ys[-1] - ys[-2]) * (x - xs[-1]) / (xs[-1] - xs[-2])

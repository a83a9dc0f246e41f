"""Lagrangian prices of the budgets. They prove an upper bound on the value of a choice."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vllm_gac.planning.knapsack.instance import Floats, Instance

_BISECTIONS = 100
_ELLIPSOIDS = 300


def prices(instance: Instance) -> Floats:
    """Find a price >= 0 for one unit of each budget. The prices nearly minimize the dual bound

        limits @ prices + sum over items of max over candidates of (value - costs @ prices)

    No choice within the limits has a value above this bound. Any prices give a valid bound. A
    lower bound makes the search shorter.

    Args:
        instance: The problem.

    Returns:
        [budgets] in units of value per unit of cost.
    """
    dual = _dual(instance)
    found = _bisect(dual) if len(instance.limits) == 1 else _ellipsoids(dual)
    price: Floats = found / np.maximum(instance.limits, 1)
    return price


@dataclass(frozen=True, slots=True)
class _Dual:
    """The candidates of all items, one item after the other.

    `values` is [n]. `costs` is [n, budgets], as shares of the limits.
    """

    values: Floats
    costs: Floats
    starts: NDArray[np.intp]  # the position of the first candidate of each item

    def bound(self, price: Floats) -> tuple[float, Floats]:
        """The bound at `price`, and its subgradient [budgets].

        The subgradient is the share of each budget that the best candidates leave unused.
        """
        reduced = self.values - self.costs @ price
        best = np.maximum.reduceat(reduced, self.starts)
        lengths = np.diff(self.starts, append=len(reduced))
        at_best = np.flatnonzero(reduced == np.repeat(best, lengths))
        first = at_best[np.searchsorted(at_best, self.starts)]
        return float(price.sum() + best.sum()), 1.0 - self.costs[first].sum(axis=0)


def _dual(instance: Instance) -> _Dual:
    items = instance.items
    return _Dual(
        np.concatenate([item.values for item in items]).astype(np.float64),
        np.concatenate([item.costs for item in items]) / np.maximum(instance.limits, 1),
        np.cumsum([0, *(len(item.values) for item in items[:-1])]),
    )


def _bisect(dual: _Dual) -> Floats:
    """For one budget, find the lowest price at which the best candidates fit."""
    low, high = np.zeros(1), np.ones(1)
    if dual.bound(low)[1][0] >= 0:
        return low
    while dual.bound(high)[1][0] < 0 and high[0] < 1e300:
        low, high = high, high * 1e6
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if dual.bound(middle)[1][0] < 0:
            low = middle
        else:
            high = middle
    return high


def _ellipsoids(dual: _Dual) -> Floats:
    """For several budgets, minimize the bound by the ellipsoid method.

    The method is that of Shor, Yudin and Nemirovski for convex functions.
    """
    n = dual.costs.shape[1]
    highest = np.maximum.reduceat(dual.values, dual.starts)
    spread = float((highest - np.minimum.reduceat(dual.values, dual.starts)).sum())
    radius = 4.0 * n * (spread + 1.0)
    center, shape = np.zeros(n), np.eye(n) * radius**2
    best, lowest = center, np.inf
    for _ in range(_ELLIPSOIDS):
        if (center < 0).any():
            cut = np.where(center == center.min(), -1.0, 0.0)
        else:
            bound, cut = dual.bound(center)
            if bound < lowest:
                best, lowest = center, bound
        length = float(np.sqrt(max(cut @ shape @ cut, 0.0)))
        if length <= 1e-12 * radius:
            break
        step = shape @ cut / length
        center = center - step / (n + 1)
        shape = n * n / (n * n - 1.0) * (shape - 2.0 / (n + 1) * np.outer(step, step))
    return best

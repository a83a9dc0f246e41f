"""The Pareto frontier of choices: those that no other choice dominates."""

import numpy as np
from numpy.typing import NDArray

_BLOCK = 128


def undominated(costs: NDArray[np.int64], values: NDArray[np.int64]) -> NDArray[np.intp]:
    """Find the rows that no other row dominates.

    A row dominates another one if none of its costs is larger and its value is not smaller, and if
    it also is better in one of them or comes earlier. With three budgets or more, some dominated
    rows may stay.

    Args:
        costs: [n, budgets]
        values: [n]

    Returns:
        The positions of the rows, in rising order.
    """
    # lexsort takes the most important key last. It sorts by rising cost, then by falling value,
    # and keeps the order of equal rows.
    order = np.lexsort((-values, *costs.T[::-1]))
    if costs.shape[1] == 1:
        kept = _rises(values[order])
    else:
        kept = _in_blocks(costs[order, 1:], values[order])
    return np.sort(order[kept])


def _rises(values: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Mark the values that are larger than all values before them."""
    kept = np.ones(len(values), dtype=bool)
    kept[1:] = values[1:] > np.maximum.accumulate(values)[:-1]
    return kept


def _in_blocks(costs: NDArray[np.int64], values: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Mark the rows that no earlier row dominates.

    The rows are sorted by their first cost, so `costs` [n, budgets - 1] holds only the other ones.
    Within a block, every row is compared with every other row. If there is one other cost, each
    block is also compared with the (cost, value) staircase of all rows before it.
    """
    kept = np.zeros(len(values), dtype=bool)
    stairs = np.empty(0, dtype=np.intp)
    earlier = np.tri(_BLOCK, k=-1, dtype=bool).T
    for start in range(0, len(values), _BLOCK):
        rows = np.arange(start, min(start + _BLOCK, len(values)))
        if costs.shape[1] == 1 and len(stairs):
            below = np.searchsorted(costs[stairs, 0], costs[rows, 0], side="right")
            beaten = (below > 0) & (values[stairs[below - 1]] >= values[rows])
            rows = rows[~beaten]
        c, v = costs[rows], values[rows]
        beats = (c[:, None] <= c[None]).all(axis=2) & (v[:, None] >= v[None])
        rows = rows[~(beats & earlier[: len(rows), : len(rows)]).any(axis=0)]
        kept[rows] = True
        if costs.shape[1] == 1:
            stairs = np.concatenate((stairs, rows))
            stairs = stairs[np.lexsort((-values[stairs], costs[stairs, 0]))]
            stairs = stairs[_rises(values[stairs])]
    return kept

"""Which choices another one makes useless."""

import numpy as np
from numpy.typing import NDArray

_BLOCK = 128


def undominated(costs: NDArray[np.int64], values: NDArray[np.int64]) -> NDArray[np.intp]:
    """Rows of costs [n, budgets] and values [n] that no other row makes useless, ascending.

    A row is useless if another one is nowhere worse, and better somewhere or earlier. With three
    budgets or more, some useless rows may stay.
    """
    # The last key counts most: rising costs, falling value, and then stable.
    order = np.lexsort((-values, *costs.T[::-1]))
    if costs.shape[1] == 1:
        kept = _rises(values[order])
    else:
        kept = _in_blocks(costs[order, 1:], values[order])
    return np.sort(order[kept])


def _rises(values: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which values are larger than all before them."""
    kept = np.ones(len(values), dtype=bool)
    kept[1:] = values[1:] > np.maximum.accumulate(values)[:-1]
    return kept


def _in_blocks(costs: NDArray[np.int64], values: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Rows in order of their first cost, of which `costs` [n, budgets - 1] has the others.

    With one other cost, each block is held against the (cost, value) staircase of all rows
    before; within a block, row against row.
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

"""A knapsack problem as arrays, without the candidates that no best choice contains."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from vllm_gac.planning.knapsack.frontier import undominated

Ints: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]

# The cost of an item that has no candidate within the limits.
_NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class Item:
    """The candidates of one item.

    Attributes:
        positions: [candidates] their positions in the item's own list.
        costs: [candidates, budgets]
        values: [candidates] in multiples of the instance's unit.
    """

    positions: NDArray[np.intp]
    costs: Ints
    values: Ints


@dataclass(frozen=True, slots=True)
class Instance:
    """A knapsack problem.

    Attributes:
        items: The items. Each has at least one candidate.
        limits: [budgets]
        unit: The value that the integer 1 stands for.
    """

    items: list[Item]
    limits: Ints
    unit: float


def instance_of(
    costs: Sequence[Ints], values: Sequence[Floats], limits: Sequence[int]
) -> Instance | None:
    """Make an instance.

    If candidates of an item are equal, the first one is kept.

    Args:
        costs: [candidates, budgets] for each item, at most 2**53.
        values: [candidates] for each item.
        limits: The limit of each budget, at most 2**53.

    Returns:
        The instance, or None if one of the limits cannot be met.
    """
    largest = max(float(np.abs(v).max()) for v in values)
    # With this shift, no sum over the items takes more than 62 bits.
    shift = 61 - math.frexp(largest)[1] - len(values).bit_length()
    items = [
        _item(c, np.rint(np.ldexp(v, shift)).astype(np.int64), np.array(limits))
        for c, v in zip(costs, values, strict=True)
    ]
    for k, limit in enumerate(limits):
        # Python's integers do not overflow.
        if sum(int(item.costs[:, k].min(initial=_NEVER)) for item in items) > limit:
            return None
    return Instance(items, np.array(limits, dtype=np.int64), math.ldexp(1.0, -shift))


def _item(costs: Ints, values: Ints, limits: Ints) -> Item:
    fitting = np.flatnonzero((costs <= limits).all(axis=1))
    best = fitting[undominated(costs[fitting], values[fitting])]
    return Item(best, costs[best], values[best])

"""The budgets that choices can exceed, and those that keep a plan from using more of each."""

from collections.abc import Mapping, Sequence

import numpy as np

from vllm_gac.planning.knapsack.instance import Floats, Ints


def tight(costs: Sequence[Ints], limits: Mapping[str, int]) -> dict[str, int]:
    """Find the budgets that some choice exceeds, or the first one if there are none.

    The best value within these is the best within all.

    Args:
        costs: [candidates, budgets] for each item.
        limits: The limit of each budget by its name, in the order of the columns of `costs`.

    Returns:
        The column of each of these budgets by its name.
    """
    most = sum(cost.max(0) for cost in costs)
    columns = dict(zip(limits, range(len(limits)), strict=True))
    found = {name: k for name, k in columns.items() if most[k] > limits[name]}
    return found or dict(list(columns.items())[:1])


def limited_by(
    costs: Sequence[Ints],
    values: Sequence[Floats],
    chosen: Sequence[int],
    limits: Mapping[str, int],
) -> dict[str, list[str]]:
    """Name for each budget the budgets that keep the plan from using more of it.

    A plan is optimal, so no single candidate with a larger value fits into all budgets. Those of
    them count that use more of a budget. If its rest suffices for some, the budgets that these
    exceed are named. If it suffices for none, the budget itself is named. If no candidate counts,
    no budget is named.

    Args:
        costs: [candidates, budgets] for each item.
        values: [candidates] for each item.
        chosen: The position of the chosen candidate of each item.
        limits: The limit of each budget by its name, in the order of the columns of `costs`.
    """
    used = sum(cost[position] for cost, position in zip(costs, chosen, strict=True))
    left = np.array(list(limits.values())) - used
    more = np.concatenate(
        [
            (cost - cost[position])[value > value[position]]
            for cost, value, position in zip(costs, values, chosen, strict=True)
        ]
    )
    exceeded, names, found = more > left, list(limits), {}
    for column, name in enumerate(names):
        counts = more[:, column] > 0
        affordable = exceeded[counts & ~exceeded[:, column]]
        if counts.any() and not len(affordable):
            found[name] = [name]
        else:
            found[name] = [
                other for other, over in zip(names, affordable.T, strict=True) if over.any()
            ]
    return found

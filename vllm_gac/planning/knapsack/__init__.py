"""Exact multi-choice knapsack: choose one candidate of each item, maximize the value, and keep
within every budget.

The Lagrangian dual gives every budget a price (dual.py). From the prices follows, for each
candidate, the least value that a choice loses if it contains this candidate. A dynamic program over
the Pareto frontier of costs and value (frontier.py) visits only the partial choices that lose less
than the best known choice does (search.py). The bounds and the core are those of Pisinger, "A
minimal algorithm for the Multiple-choice Knapsack Problem", European Journal of Operational
Research 83, 1995.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from vllm_gac.errors import PlanError
from vllm_gac.planning.knapsack.instance import Floats, Ints, instance_of
from vllm_gac.planning.knapsack.problem import KnapsackCandidate, KnapsackProblem
from vllm_gac.planning.knapsack.search import best_choice

# The name of the budget if a problem has only one.
SINGLE = "cost"
# An error names at most this many items if a budget cannot be met.
_MAX_NAMED = 3


@dataclass(frozen=True, slots=True)
class Solution:
    """The best choice that was found.

    Attributes:
        choice: The chosen dim of each item, by the item's name.
        costs: The cost under each budget, by the budget's name ("cost" if it has none).
        value: The sum of the values.
        gap: No choice has a value above value + gap. The gap is 0 unless the search gave up
            because the problem was too hard.
    """

    choice: Mapping[str, int]
    costs: Mapping[str, int]
    value: float
    gap: float


def choose(
    costs: Sequence[Ints],
    values: Sequence[Floats],
    limits: Mapping[str, int],
    names: Sequence[str] = (),
    progress: bool = False,
    tolerance: float = 0.0,
) -> tuple[list[int], float]:
    """Choose the best candidate of each item as `solve` does, but from arrays.

    Args:
        costs: [candidates, budgets] for each item.
        values: [candidates] for each item.
        limits: The limit of each budget by its name.
        names: The items' names, for the error message.
        progress: Whether to show progress bars if the search takes long.
        tolerance: The gap at which the search may stop.

    Returns:
        The position of the chosen candidate of each item, and the gap.

    Raises:
        PlanError: If no choice is within the limits. The message gives the smallest limit that
            can be met.
    """
    found = best_choice(instance_of(costs, values, list(limits.values())), progress, tolerance)
    if found is None:
        raise PlanError(_infeasible(list(costs), limits, names, progress))
    return list(found.positions), found.gap


def solve(problem: KnapsackProblem, progress: bool = False) -> Solution:
    """Find the choice with the largest value within the budgets.

    If two choices have the same value, the one with the smaller cost wins; with several budgets,
    the first cost that differs decides. If the costs are the same too, the smaller dim wins for the
    first item that differs. Values are added as 62-bit fixed-point numbers, so the order of the
    additions does not change the sum. Costs are integers.

    Args:
        problem: The items, their candidates and the budgets.
        progress: Whether to show progress bars if the search takes long.

    Returns:
        The best choice.

    Raises:
        PlanError: If no choice is within the budgets. The message gives the smallest budget that
            can be met.
    """
    budgets = problem.budgets if problem.budgets is not None else {SINGLE: problem.budget or 0}
    items = [sorted(item.candidates, key=lambda c: c.dim) for item in problem.items]
    costs = [_costs(candidates, list(budgets)) for candidates in items]
    values = [np.array([c.value for c in candidates]) for candidates in items]
    names = [item.name for item in problem.items]
    positions, gap = choose(costs, values, budgets, names, progress)
    chosen = [candidates[i] for candidates, i in zip(items, positions, strict=True)]
    return Solution(
        choice={item.name: c.dim for item, c in zip(problem.items, chosen, strict=True)},
        costs=dict(zip(budgets, _spent(costs, positions), strict=True)),
        value=math.fsum(c.value for c in chosen),
        gap=gap,
    )


def _costs(candidates: Sequence[KnapsackCandidate], budgets: list[str]) -> Ints:
    """The costs [candidates, budgets]."""
    rows = [[c.cost if c.costs is None else c.costs[name] for name in budgets] for c in candidates]
    return np.array(rows, dtype=np.int64)


def _spent(costs: list[Ints], positions: Sequence[int]) -> list[int]:
    rows = [c[i].tolist() for c, i in zip(costs, positions, strict=True)]
    return [sum(column) for column in zip(*rows, strict=True)]


def _infeasible(
    costs: list[Ints], budgets: Mapping[str, int], items: Sequence[str], progress: bool
) -> str:
    """Describe the first budget that cannot be met.

    The message gives the smallest value that this budget can have while the budgets before it
    hold, and the items whose cheapest candidates use most of it.
    """
    names, limits = list(budgets), list(budgets.values())
    least = [_least(costs, 0, [], progress)]
    while least[-1] <= limits[len(least) - 1]:
        least.append(_least(costs, len(least), limits[: len(least)], progress))
    k = len(least) - 1
    given = "".join(f" with {names[i]} <= {limits[i]}" for i in range(k))
    return (
        f"infeasible: {names[k]} <= {limits[k]} cannot be met: "
        f"the smallest feasible {names[k]}{given} is {least[k]}{_binding(costs, k, items)}"
    )


def _binding(costs: list[Ints], k: int, items: Sequence[str]) -> str:
    if not items:
        return ""
    cheapest = [int(c[:, k].min()) for c in costs]
    most = sorted(range(len(items)), key=lambda i: -cheapest[i])[:_MAX_NAMED]
    named = ", ".join(f"{items[i]} {cheapest[i]}" for i in most)
    return f"; the cheapest candidates that take most of it: {named}"


def _least(costs: list[Ints], k: int, limits: list[int], progress: bool) -> int:
    """The smallest cost under budget `k` of any choice within the `limits` of earlier budgets."""
    if not limits:
        return sum(int(c[:, k].min()) for c in costs)
    savings = [-c[:, k].astype(np.float64) for c in costs]
    found = best_choice(instance_of([c[:, :k] for c in costs], savings, limits), progress)
    assert found is not None  # the caller has checked that the limits can be met
    return _spent(costs, found.positions)[k]

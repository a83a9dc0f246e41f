"""Multiple-choice knapsack: one candidate of each item, the largest value within every budget.

HiGHS solves it (`scipy.optimize`), after three steps that leave it little to do:

1. Candidates that another one of their item dominates are left out, and equal items are counted.
2. The linear relaxation gives each budget a price. From the prices follows a bound on the value,
   and how far a choice stays below the bound, at least, if it contains a certain candidate.
3. Branch and cut chooses among the core: the candidates of choices that are near the bound. If its
   choice proves that a better one could only lie outside, the core grows to where it could be.

Nothing depends on the time or the number of threads, so equal problems have equal solutions.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, linprog, milp
from scipy.sparse import csr_array

from vllm_gac.errors import PlanError

Ints: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]

# A choice is good enough if what it loses is at most this share above what any other one loses. The
# loss of a choice is the distance of its value from that of the best candidates of all items.
GAP = 1e-3
# The first core has the candidates of choices that lose at most this share more than the bound.
_CORE = 2 * GAP
# Branch and cut stops after so many nodes, and the gap that is left is reported. Only problems with
# three budgets that can hardly be met together need as many.
_MAX_NODES = 1000
# Budgets are counted in so many units at most. HiGHS may exceed them by a millionth of a unit. Then
# it gets less of them, at most this often.
_UNITS, _ATTEMPTS = 1000, 4


@dataclass(frozen=True, slots=True)
class Choice:
    """The best choice that was found.

    Attributes:
        positions: The position of the chosen candidate of each item.
        gap: No other choice has a value that is larger by more than this.
    """

    positions: list[int]
    gap: float


def choose(costs: Sequence[Ints], values: Sequence[Floats], limits: Mapping[str, int]) -> Choice:
    """Choose one candidate of each item, with the largest value within the limits.

    Args:
        costs: [candidates, budgets] for each item.
        values: [candidates] for each item.
        limits: The limit of each budget by its name.

    Raises:
        PlanError: If no choice is within the limits, or none was found.
    """
    # Every choice pays for the cheapest candidates.
    above = [cost - cost.min(axis=0) for cost in costs]
    bounds = np.array(list(limits.values())) - sum(cost.min(axis=0) for cost in costs)
    # Budgets that no choice exceeds do not matter, but one is kept: of equal values, the cheaper.
    columns = np.flatnonzero(sum(cost.max(axis=0) for cost in above) > bounds)
    columns = columns if len(columns) else np.arange(1)
    costs, bounds = [cost[:, columns] for cost in above], bounds[columns]
    room = bounds.copy()
    for _ in range(_ATTEMPTS):
        if (solution := _branch_and_cut(costs, values, bounds, room)) is None:
            break
        over = _spent(costs, solution.positions) - bounds
        if (over <= 0).all():
            return _improved(costs, values, bounds, solution)
        room -= np.maximum(over, 0)
    raise PlanError(f"no choice is within all of {', '.join(limits)}")


def _branch_and_cut(
    costs: Sequence[Ints], values: Sequence[Floats], bounds: Ints, room: Ints
) -> Choice | None:
    """A good choice within `room`, which is not larger than the bounds; None if there is none."""
    alike: dict[bytes, list[int]] = {}
    for item, (cost, value) in enumerate(zip(costs, values, strict=True)):
        alike.setdefault(cost.tobytes() + value.tobytes(), []).append(item)
    members = list(alike.values())
    kept = [_undominated(costs[same[0]], values[same[0]], bounds) for same in members]
    if not all(map(len, kept)):
        return None
    sizes, counts = [len(positions) for positions in kept], np.array([len(s) for s in members])
    groups, first = np.repeat(np.arange(len(kept)), sizes), np.cumsum([0, *sizes[:-1]])
    losses = np.concatenate(
        [values[s[0]].max() - values[s[0]][k] for s, k in zip(members, kept, strict=True)]
    )
    unit, units = float(losses.max()) or 1.0, np.maximum(bounds / _UNITS, 1.0)
    losses /= unit
    scaled = np.concatenate([costs[s[0]][k] for s, k in zip(members, kept, strict=True)]) / units
    solved = linprog(losses, scaled.T, bounds / units, _sums(groups), counts)
    if solved.x is None:
        return None
    # The bound is computed from the prices, so that it holds however exact they are.
    prices = np.maximum(-solved.ineqlin.marginals, 0)
    reduced = losses + scaled @ prices
    minima = np.minimum.reduceat(reduced, first)
    bound = max(0.0, float(counts @ minima - bounds / units @ prices))
    reduced -= minima[groups]  # how much more than the bound a choice with it loses, at least
    scale = bound or 1.0  # HiGHS' absolute tolerances suit losses of about 1
    width = _CORE * bound
    while True:
        core = np.flatnonzero(reduced <= width)
        result = milp(
            losses[core] / scale,
            integrality=1,
            bounds=Bounds(0, counts[groups[core]]),
            constraints=[
                LinearConstraint(_sums(groups[core]), counts, counts),
                LinearConstraint(scaled[core].T, ub=room / units),
            ],
            options={"mip_rel_gap": GAP, "node_limit": _MAX_NODES},
        )
        is_complete = len(core) == len(losses)
        if result.x is None:
            if is_complete:
                return None
            width = 4 * width + 1e-9
            continue
        lost = float(losses[core] @ result.x)
        lower_bound = max(bound, scale * result.mip_dual_bound)
        outside = np.inf if is_complete else bound + width
        gap = max(0.0, lost - min(lower_bound, outside))
        if gap <= GAP * lost or outside >= lower_bound:
            break
        width = lost - bound
    positions, chosen = [0] * len(costs), np.rint(result.x).astype(np.int64)
    for group, same in enumerate(members):
        of_group = core[groups[core] == group] - first[group]
        times = chosen[groups[core] == group]
        for item, position in zip(same, np.repeat(kept[group][of_group], times), strict=True):
            positions[item] = int(position)
    return Choice(positions, unit * gap)


def _improved(
    costs: Sequence[Ints], values: Sequence[Floats], bounds: Ints, choice: Choice
) -> Choice:
    """Exchange single candidates for better ones that still fit, until there are none."""
    positions, gap = list(choice.positions), choice.gap
    left = bounds - _spent(costs, positions)
    improving = True
    while improving:
        improving = False
        for item, (cost, value) in enumerate(zip(costs, values, strict=True)):
            at = positions[item]
            fits = np.flatnonzero((cost - cost[at] <= left).all(axis=1))
            best = int(fits[value[fits].argmax()])
            if value[best] > value[at]:
                left -= cost[best] - cost[at]
                gap = max(0.0, gap - float(value[best] - value[at]))
                positions[item], improving = best, True
    return Choice(positions, gap)


def _undominated(costs: Ints, values: Floats, bounds: Ints) -> NDArray[np.intp]:
    """The positions of the candidates within the bounds that no other one dominates.

    One dominates another if none of its costs is larger, and its value is not smaller.
    """
    rest = np.flatnonzero((costs <= bounds).all(axis=1))
    points = np.vstack((costs[rest].T, -values[rest]))  # rows are contiguous: they are compared
    # In this order, none is dominated by a later one.
    spans = points.max(axis=1, initial=0) - points.min(axis=1, initial=0)
    order = np.argsort((points.T / np.maximum(spans, 1e-300)).sum(axis=1), kind="stable")
    rest, points = rest[order], points[:, order]
    kept = []
    while len(rest):
        kept.append(rest[0])
        better = np.logical_or.reduce([row < row[0] for row in points])
        rest, points = rest[better], points[:, better]
    return np.sort(np.array(kept, dtype=np.intp))


def _spent(costs: Sequence[Ints], positions: Sequence[int]) -> Ints:
    spent: Ints = np.sum([c[p] for c, p in zip(costs, positions, strict=True)], axis=0)
    return spent


def _sums(groups: NDArray[np.intp]) -> csr_array:
    """A matrix that sums up the candidates of each group."""
    return csr_array((np.ones(len(groups)), (groups, np.arange(len(groups)))))

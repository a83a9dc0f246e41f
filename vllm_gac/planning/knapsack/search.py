"""The dynamic program over partial choices. The dual bound limits what it visits."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from vllm_gac.errors import PlanError
from vllm_gac.planning.knapsack.dual import prices
from vllm_gac.planning.knapsack.frontier import undominated
from vllm_gac.planning.knapsack.instance import Floats, Instance, Ints

# The number of partial choices that each pass keeps after an item. An early pass finds a good
# solution quickly, and this makes the next pass shorter. Only artificial problems need the last
# pass.
_BEAMS = (1 << 8, 1 << 11, 1 << 14, 1 << 16)
# Bounds on time and memory for problems with many items or candidates: the partial choices that are
# kept over all items, and the numbers in the costs of those that are made at once.
_MAX_KEPT = 1 << 24
_MAX_MADE = 1 << 23
# A pass that keeps this many does not need to distinguish equally good choices any more.
_ENOUGH_FOR_TIES = 1 << 14


@dataclass(frozen=True, slots=True)
class Choice:
    """A choice.

    Attributes:
        positions: The position of the chosen candidate of each item.
        gap: No other choice has a value that is larger by more than this.
    """

    positions: list[int]
    gap: float


def best_choice(
    instance: Instance | None, progress: bool = False, tolerance: float = 0.0
) -> Choice | None:
    """Find the best choice within the limits.

    Args:
        instance: The problem, or None if it has no solution.
        progress: Whether to show a bar for each pass.
        tolerance: A choice is good enough if no other value is larger by more than this.

    Returns:
        The choice, or None if there is none.

    Raises:
        PlanError: If no choice was found, although there may be one. This only happens with
            several budgets that can hardly be met together.
    """
    if instance is None:
        return None
    bounded = _bounded(instance)
    known = _fitting_at_higher_prices(bounded)
    for beam in (beam for beam in _BEAMS if beam * len(bounded.losses) <= _MAX_KEPT):
        found, complete = _search(bounded, bounded.loss_of(known), beam, progress)
        known = found or known
        if complete or (_is_tight(bounded, known) and beam >= _ENOUGH_FOR_TIES):
            return None if known is None else Choice(_positions(instance, known), 0.0)
        if bounded.loss_of(known) * instance.unit <= tolerance:
            break
    if known is None:
        raise PlanError("no choice within all budgets was found; larger ones make it easier")
    return Choice(_positions(instance, known), bounded.loss_of(known) * instance.unit)


@dataclass(frozen=True, slots=True)
class _Bounded:
    """An instance with its prices and its bound.

    Attributes:
        instance: The problem.
        prices: [budgets]
        bound: No choice has a larger value.
        losses: [candidates] for each item: how far a choice stays below the bound, at least, if it
            contains the candidate.
        tolerance: The floating-point error of a sum of losses.
    """

    instance: Instance
    prices: Floats
    bound: float
    losses: list[Floats]
    tolerance: float

    def loss_of(self, choice: Sequence[int] | None) -> float:
        """How far the value of a choice stays below the bound.

        `choice` has an index into the candidates of each item. Without a choice it is infinite.
        """
        if choice is None:
            return np.inf
        chosen = zip(self.instance.items, choice, strict=True)
        return self.bound - sum(int(item.values[i]) for item, i in chosen)


def _bounded(instance: Instance) -> _Bounded:
    price = prices(instance)
    reduced = [item.values - item.costs @ price for item in instance.items]
    best = [float(r.max()) for r in reduced]
    bound = float(instance.limits @ price) + sum(best)
    magnitude = float(instance.limits @ price) + sum(float(np.abs(r).max()) for r in reduced)
    losses = [b - r for b, r in zip(best, reduced, strict=True)]
    return _Bounded(instance, price, bound, losses, 1e-12 * magnitude)


def _fitting_at_higher_prices(bounded: _Bounded) -> list[int] | None:
    """Find a first choice within the limits.

    The prices are raised until the best candidates at these prices fit. Returns None if they never
    do.
    """
    items, limits = bounded.instance.items, bounded.instance.limits
    for raise_by in (0.0, 1e-6, 1e-4, 1e-3, 1e-2, 1e-1, 1.0):
        price = bounded.prices * (1 + raise_by)
        choice = [int((item.values - item.costs @ price).argmax()) for item in items]
        if (sum(item.costs[i] for item, i in zip(items, choice, strict=True)) <= limits).all():
            return choice
    return None


def _is_tight(bounded: _Bounded, choice: list[int] | None) -> bool:
    """Whether no other choice can be better. Another one may be equally good."""
    return bounded.loss_of(choice) <= bounded.tolerance


def _search(
    bounded: _Bounded, most_loss: float, beam: int, progress: bool
) -> tuple[list[int] | None, bool]:
    """Run one pass over the items.

    Partial choices stay in lexicographic order, so the first of several equal ones is kept.

    Args:
        bounded: The instance with its bound.
        most_loss: The pass looks for choices that stay below the bound by at most this.
        beam: The most partial choices that are kept after an item.
        progress: Whether to show a bar.

    Returns:
        The best choice, or None if there is none; and whether the pass was complete, which it is
        if it never had to drop a partial choice for the beam.
    """
    most_loss += bounded.tolerance
    budgets = len(bounded.prices)
    stages = _stages(bounded, most_loss)
    most = max(len(stage.candidates) for stage in stages) * max(2, budgets)
    beam = max(1, min(beam, _MAX_MADE // most))
    costs, values = np.zeros((1, budgets), dtype=np.int64), np.zeros(1, dtype=np.int64)
    losses = np.zeros(1)
    history: list[NDArray[np.intp]] = []
    complete = True
    bar = tqdm(stages, f"choose, {beam} at a time", unit="item", delay=1, disable=not progress)
    for stage in bar:
        costs = (costs[:, None] + stage.costs).reshape(-1, budgets)
        values = np.add.outer(values, stage.values).ravel()
        losses = np.add.outer(losses, stage.losses).ravel()
        left = bounded.instance.limits - costs
        # A budget that must stay unused counts as a loss, too.
        at_least = losses + np.maximum(left - stage.most_after, 0) @ bounded.prices
        rows = np.flatnonzero((left >= stage.least_after).all(axis=1) & (at_least <= most_loss))
        rows = rows[undominated(costs[rows], values[rows])]
        if len(rows) > beam:
            complete = False
            rows = np.sort(rows[np.argpartition(at_least[rows], beam)[:beam]])
        history.append(rows)
        costs, values, losses = costs[rows], values[rows], losses[rows]
    if not len(values):
        return None, complete
    best = int(np.lexsort((*costs.T[::-1], -values))[0])
    return _traced_back(stages, history, best), complete


@dataclass(frozen=True, slots=True)
class _Stage:
    """One item in a pass: the candidates that a good choice can contain.

    `least_after` and `most_after` are the smallest and largest costs of the items after this one.
    """

    candidates: NDArray[np.intp]  # [c], indices into the item's candidates
    costs: Ints  # [c, budgets]
    values: Ints  # [c]
    losses: Floats  # [c]
    least_after: Ints  # [budgets]
    most_after: Floats  # [budgets]; inexact above 2**53, but no limit is larger


def _stages(bounded: _Bounded, most_loss: float) -> list[_Stage]:
    least = np.zeros(len(bounded.prices), dtype=np.int64)
    most = np.zeros(len(bounded.prices))
    stages = []
    for item, losses in zip(bounded.instance.items[::-1], bounded.losses[::-1], strict=True):
        kept = np.flatnonzero(losses <= most_loss)
        costs = item.costs[kept]
        stages.append(_Stage(kept, costs, item.values[kept], losses[kept], least, most))
        least, most = least + costs.min(axis=0), most + costs.max(axis=0)
    return stages[::-1]


def _traced_back(stages: list[_Stage], history: list[NDArray[np.intp]], state: int) -> list[int]:
    """Follow the final `state` back through the `history` to the candidate of each item."""
    choice = []
    for stage, rows in zip(stages[::-1], history[::-1], strict=True):
        state, candidate = divmod(int(rows[state]), len(stage.candidates))
        choice.append(int(stage.candidates[candidate]))
    return choice[::-1]


def _positions(instance: Instance, choice: list[int]) -> list[int]:
    return [int(item.positions[i]) for item, i in zip(instance.items, choice, strict=True)]

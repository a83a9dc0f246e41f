"""The dynamic program over partial choices, bounded by the dual."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from vllm_gac.errors import PlanError
from vllm_gac.planning.knapsack.dual import prices
from vllm_gac.planning.knapsack.frontier import undominated
from vllm_gac.planning.knapsack.instance import Floats, Instance, Ints

# Partial choices kept after an item, pass by pass: good solutions first, which make the next
# pass shorter. Only artificial problems need the last one, or more.
_BEAMS = (1 << 8, 1 << 11, 1 << 14, 1 << 16)
# What bounds time and memory where a beam would not: kept ones over all items, and the costs of
# those that are made at once.
_MAX_KEPT = 1 << 24
_MAX_MADE = 1 << 23
# With so many kept, equally good choices need not be told apart any more.
_ENOUGH_FOR_TIES = 1 << 14


@dataclass(frozen=True, slots=True)
class Choice:
    """The position of the chosen candidate of each item, and how much more there may be."""

    positions: list[int]
    gap: float


def best_choice(
    instance: Instance | None, progress: bool = False, tolerance: float = 0.0
) -> Choice | None:
    """The best choice within the limits; None if there is none.

    Args:
        instance: The problem; None if it has no solution.
        progress: Whether to show a bar for each pass.
        tolerance: A choice is good enough if no other is worth more than this above it.

    Raises:
        PlanError: If no choice was found. This does not prove that there is none; it takes
            several budgets that hardly fit together.
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
    """An instance with prices, the bound they prove, and what each candidate loses against it."""

    instance: Instance
    prices: Floats
    bound: float
    losses: list[Floats]
    tolerance: float  # of floating-point error in losses

    def loss_of(self, choice: Sequence[int] | None) -> float:
        """How far a choice (indices into the items' candidates) stays below the bound."""
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
    """A first choice within the limits: what is best at prices that were raised until it fits."""
    items, limits = bounded.instance.items, bounded.instance.limits
    for raise_by in (0.0, 1e-6, 1e-4, 1e-3, 1e-2, 1e-1, 1.0):
        price = bounded.prices * (1 + raise_by)
        choice = [int((item.values - item.costs @ price).argmax()) for item in items]
        if (sum(item.costs[i] for item, i in zip(items, choice, strict=True)) <= limits).all():
            return choice
    return None


def _is_tight(bounded: _Bounded, choice: list[int] | None) -> bool:
    """Whether nothing can be better, though something may be as good."""
    return bounded.loss_of(choice) <= bounded.tolerance


def _search(
    bounded: _Bounded, most_loss: float, beam: int, progress: bool
) -> tuple[list[int] | None, bool]:
    """The best choice that loses at most `most_loss`, and whether `beam` never cut anything off.

    Partial choices stay in lexicographic order, so that of equal ones the first is kept.
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
        # What stays unspent is lost, too.
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
    """The candidates of one item that a good choice can contain, and what the later items cost."""

    candidates: NDArray[np.intp]  # [c], indices into the item's
    costs: Ints  # [c, budgets]
    values: Ints  # [c]
    losses: Floats  # [c]
    least_after: Ints  # [budgets]
    most_after: Floats  # [budgets]; inexact beyond 2**53, which no limit exceeds


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
    """The candidate of each item on the way to the final `state`."""
    choice = []
    for stage, rows in zip(stages[::-1], history[::-1], strict=True):
        state, candidate = divmod(int(rows[state]), len(stage.candidates))
        choice.append(int(stage.candidates[candidate]))
    return choice[::-1]


def _positions(instance: Instance, choice: list[int]) -> list[int]:
    return [int(item.positions[i]) for item, i in zip(instance.items, choice, strict=True)]

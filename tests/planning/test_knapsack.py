"""The knapsack agrees with brute force, and keeps its budgets and its gap."""

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_gac.errors import PlanError
from vllm_gac.planning import knapsack
from vllm_gac.planning.knapsack import GAP, choose

Problem = tuple[list[Any], list[Any], dict[str, int]]


def value_of(values: list[Any], positions: list[int]) -> float:
    return float(sum(value[p] for value, p in zip(values, positions, strict=True)))


def spent(costs: list[Any], positions: list[int]) -> Any:
    return sum(cost[p] for cost, p in zip(costs, positions, strict=True))


def most(values: list[Any]) -> float:
    return float(sum(value.max() for value in values))


def brute_force(costs: list[Any], values: list[Any], limits: dict[str, int]) -> float | None:
    """The largest value of all choices within the limits."""
    bounds = list(limits.values())
    choices = itertools.product(*(range(len(value)) for value in values))
    within = (value_of(values, c) for c in choices if (spent(costs, c) <= bounds).all())
    return max(within, default=None)


# Few distinct values make ties common. Some values are unusual.
small_values = st.integers(0, 4).map(float)
odd_values = st.integers(-(10**9), 10**9).map(lambda n: n / 1024)


@st.composite
def problems(draw: st.DrawFn, budgets: int) -> Problem:
    value = draw(st.sampled_from([small_values, odd_values]))
    candidate = st.tuples(st.lists(st.integers(0, 9), min_size=budgets, max_size=budgets), value)
    items = draw(st.lists(st.lists(candidate, min_size=1, max_size=4), min_size=1, max_size=5))
    limits = {f"budget{k}": draw(st.integers(0, 9 * len(items))) for k in range(budgets)}
    costs = [np.array([cost for cost, _ in item]) for item in items]
    return costs, [np.array([v for _, v in item]) for item in items], limits


@pytest.mark.parametrize("budgets", [1, 2, 3])
@settings(max_examples=60)
@given(data=st.data())
def test_finds_what_brute_force_finds(budgets: int, data: st.DataObject) -> None:
    costs, values, limits = data.draw(problems(budgets))
    best = brute_force(costs, values, limits)
    if best is None:
        with pytest.raises(PlanError, match="budget0"):
            choose(costs, values, limits)
        return
    choice = choose(costs, values, limits)
    assert (spent(costs, choice.positions) <= list(limits.values())).all()
    value, lost = value_of(values, choice.positions), most(values) - best
    assert choice.gap <= (GAP + 1e-6) * (most(values) - value) + 1e-6
    assert value <= best <= value + choice.gap + 1e-6 * (1 + lost)


def low_rank_problem(items: int, budget_share: float) -> Problem:
    """A problem like the planner's: aligned ranks for the linears of Llama-3-8B, concave values."""
    rng = np.random.default_rng(0)
    shapes = np.array([(4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336)])[
        np.arange(items) % 4
    ]
    break_even = shapes.prod(1) / shapes.sum(1)
    dims = (np.linspace(0.3, 1, 12) * break_even[:, None]) // 64 * 64
    parameters = (dims * shapes.sum(1)[:, None]).astype(int)
    cached = np.where(np.arange(items)[:, None] % 4 == 1, np.arange(12) * 8, 0)
    decay = rng.uniform(2, 8, (items, 1)) / break_even[:, None]
    values = rng.gamma(2, 1, (items, 1)) * (1 - np.exp(-decay * dims))
    limits = {"parameters": int(shapes.prod(1).sum() * budget_share), "cache": items // 4 * 60}
    return list(np.stack((parameters, cached), axis=2)), list(values), limits


def test_a_large_problem_is_solved_up_to_the_gap() -> None:
    costs, values, limits = low_rank_problem(224, 0.8)
    choice = choose(costs, values, limits)
    left = np.array(list(limits.values())) - spent(costs, choice.positions)
    assert (left >= 0).all()
    assert choice.gap <= GAP * (most(values) - value_of(values, choice.positions))
    for cost, value, at in zip(costs, values, choice.positions, strict=True):
        assert value[(cost - cost[at] <= left).all(1)].max() == value[at]
    assert choose(costs, values, limits) == choice


def test_equal_items_are_solved_as_one_group(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = []
    solve = knapsack.milp
    monkeypatch.setattr(knapsack, "milp", lambda c, **k: variables.append(len(c)) or solve(c, **k))
    costs, values, limits = low_rank_problem(4, 0.8)
    choose(costs * 60, values * 60, {name: 60 * n for name, n in limits.items()})
    assert max(variables) <= 4 * 12


def test_a_budget_is_used_to_the_last_unit_and_not_beyond() -> None:
    # One unit of so many is below what HiGHS tells apart.
    large = [np.array([[1 << 40], [(1 << 40) + 1]])] * 3
    assert sorted(
        choose(large, [np.array([8.0, 16.0])] * 3, {"cost": (3 << 40) + 1}).positions
    ) == [0, 0, 1]


def test_a_search_that_stops_early_reports_its_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Subset sums of large random numbers, of which no choice is dominated."""
    monkeypatch.setattr(knapsack, "_MAX_NODES", 1)
    rng = np.random.default_rng(0)
    costs = [rng.integers(1, 10**6, (4, 3)) for _ in range(14)]
    values = [cost @ [1.0, 2.0, 3.0] for cost in costs]
    limits = dict(zip("abc", (6 * 10**6, 7 * 10**6, 8 * 10**6), strict=True))
    early = choose(costs, values, limits)
    monkeypatch.undo()
    best = value_of(values, choose(costs, values, limits).positions)
    assert best <= value_of(values, early.positions) + early.gap

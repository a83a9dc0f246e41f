"""The knapsack is exact: it agrees with brute force and with HiGHS, and keeps its promises."""

import itertools
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp

from vllm_gac.errors import PlanError
from vllm_gac.layout.schema import validate
from vllm_gac.planning.knapsack import Solution, solve
from vllm_gac.planning.knapsack.problem import KnapsackProblem


def problem(raw: dict[str, Any]) -> KnapsackProblem:
    return validate(KnapsackProblem, raw, "problem", PlanError)


def one_budget(budget: int, *items: list[tuple[int, int, float]]) -> KnapsackProblem:
    """A problem with the items "a", "b", ..., each with candidates (dim, cost, value)."""
    return problem(
        {
            "budget": budget,
            "items": [
                {
                    "name": chr(ord("a") + i),
                    "candidates": [{"dim": d, "cost": c, "value": v} for d, c, v in item],
                }
                for i, item in enumerate(items)
            ],
        }
    )


def brute_force(p: KnapsackProblem) -> tuple[Fraction, list[int], list[int]] | None:
    """(value, costs, dims) of the best choice in the documented order, by exact arithmetic."""
    limits = [p.budget] if p.budgets is None else list(p.budgets.values())
    best = None
    for chosen in itertools.product(*(item.candidates for item in p.items)):
        if p.budgets is None:
            costs = [sum(c.cost for c in chosen)]
        else:
            costs = [sum(c.costs[name] for c in chosen) for name in p.budgets]
        if any(cost > limit for cost, limit in zip(costs, limits, strict=True)):
            continue
        key = (-sum(Fraction(c.value) for c in chosen), costs, [c.dim for c in chosen])
        if best is None or key < best:
            best = key
    return best and (-best[0], best[1], best[2])


def assert_best(p: KnapsackProblem, solution: Solution) -> None:
    value, costs, dims = brute_force(p)
    assert solution.value == pytest.approx(float(value), rel=1e-12)
    assert (list(solution.costs.values()), list(solution.choice.values())) == (costs, dims)
    assert solution.gap == 0.0


# Few distinct values make ties common, so every tie-break is tested. Some values are unusual.
small_values = st.integers(0, 4).map(float)
odd_values = st.integers(-(10**9), 10**9).map(lambda n: n / 1024)


@st.composite
def problems(draw: st.DrawFn, budgets: int) -> KnapsackProblem:
    values = draw(st.sampled_from([small_values, odd_values]))
    names = [f"budget{i}" for i in range(budgets)]
    candidate = st.fixed_dictionaries(
        {
            "dim": st.integers(0, 6),
            "value": values,
            "costs": st.fixed_dictionaries({name: st.integers(0, 9) for name in names}),
        }
    )
    items = draw(st.lists(st.lists(candidate, min_size=1, max_size=4), min_size=1, max_size=5))
    return problem(
        {
            "budgets": {name: draw(st.integers(0, 9 * len(items))) for name in names},
            "items": [{"name": str(i), "candidates": c} for i, c in enumerate(items)],
        }
    )


@pytest.mark.parametrize("budgets", [1, 2, 3])
@settings(max_examples=100)
@given(data=st.data())
def test_finds_what_brute_force_finds_ties_included(budgets: int, data: st.DataObject) -> None:
    p = data.draw(problems(budgets))
    if brute_force(p) is None:
        with pytest.raises(PlanError, match="infeasible"):
            solve(p)
    else:
        assert_best(p, solve(p))


def random_problem(rng: np.random.Generator, items: int, candidates: int, budgets: int) -> Any:
    """Costs [items, candidates, budgets], values, and limits that a random choice meets."""
    costs = rng.integers(1, 10**6, (items, candidates, budgets))
    values = rng.random((items, candidates)) * 100
    some_choice = costs[np.arange(items), rng.integers(0, candidates, items)]
    return costs, values, some_choice.sum(0)


def highs(costs: Any, values: Any, limits: Any) -> float:
    """The optimal value, as the branch and cut of HiGHS finds it."""
    items, candidates = values.shape
    one_each = np.kron(np.eye(items), np.ones(candidates))
    result = milp(
        -values.ravel(),
        constraints=[
            LinearConstraint(one_each, 1, 1),
            LinearConstraint(costs.reshape(-1, costs.shape[2]).T, ub=limits),
        ],
        integrality=1,
        bounds=Bounds(0, 1),
        options={"mip_rel_gap": 0},
    )
    assert result.success
    return -float(result.fun)


def as_problem(costs: Any, values: Any, limits: Any) -> KnapsackProblem:
    names = [f"budget{k}" for k in range(len(limits))]
    return problem(
        {
            "budgets": dict(zip(names, map(int, limits), strict=True)),
            "items": [
                {
                    "name": str(i),
                    "candidates": [
                        {"dim": j, "value": v, "costs": dict(zip(names, map(int, c), strict=True))}
                        for j, (v, c) in enumerate(zip(values[i], costs[i], strict=True))
                    ],
                }
                for i in range(len(values))
            ],
        }
    )


@pytest.mark.parametrize(("items", "candidates", "budgets"), [(25, 6, 1), (12, 5, 2), (8, 4, 3)])
def test_agrees_with_highs(items: int, candidates: int, budgets: int) -> None:
    rng = np.random.default_rng(items)
    for _ in range(12):
        costs, values, limits = random_problem(rng, items, candidates, budgets)
        solution = solve(as_problem(costs, values, limits))
        assert solution.value == pytest.approx(highs(costs, values, limits), rel=1e-9)
        assert (np.array(list(solution.costs.values())) <= limits).all()
        assert solution.gap == 0.0


def low_rank_problem(items: int, budget_share: float) -> tuple[Any, Any, Any]:
    """A problem like the planner's: aligned ranks for the linears of Llama-3-8B, concave values."""
    rng = np.random.default_rng(0)
    shapes = np.array([(4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336)])[
        np.arange(items) % 4
    ]
    break_even = shapes.prod(1) / shapes.sum(1)
    dims = (np.linspace(0.3, 1, 12) * break_even[:, None]) // 64 * 64
    costs = (dims * shapes.sum(1)[:, None]).astype(int)[..., None]
    decay = rng.uniform(2, 8, (items, 1)) / break_even[:, None]
    values = rng.gamma(2, 1, (items, 1)) * (1 - np.exp(-decay * dims))
    return costs, values, np.array([int(shapes.prod(1).sum() * budget_share)])


def test_a_large_realistic_problem_is_solved_to_proven_optimality() -> None:
    costs, values, limits = low_rank_problem(224, 0.8)
    solution = solve(as_problem(costs, values, limits))
    assert solution.gap == 0.0
    assert 0.999 * limits[0] < solution.costs["budget0"] <= limits[0]
    # No other candidate of a single item gains value and still fits.
    spare = limits[0] - solution.costs["budget0"]
    for i, dim in enumerate(solution.choice.values()):
        fits = costs[i, :, 0] - costs[i, dim, 0] <= spare
        assert values[i, fits].max() <= values[i, dim]


def test_two_budgets_of_a_large_realistic_problem_are_met() -> None:
    costs, values, limits = low_rank_problem(100, 0.8)
    kv = np.where(np.arange(100)[:, None] % 4 == 1, np.arange(12) * 8, 0)[..., None]
    both = np.concatenate((costs, kv), axis=2)
    solution = solve(as_problem(both, values, np.array([limits[0], 25 * 60])))
    assert solution.gap == 0.0
    assert solution.costs["budget0"] <= limits[0]
    assert solution.costs["budget1"] <= 25 * 60


def test_one_budget_and_a_list_of_one_agree() -> None:
    candidates = [(8, 8, 1.0), (16, 16, 1.5), (24, 24, 1.75)]
    single = solve(one_budget(40, candidates, candidates))
    several = solve(
        problem(
            {
                "budgets": {"params": 40},
                "items": [
                    {
                        "name": name,
                        "candidates": [
                            {"dim": d, "value": v, "costs": {"params": c}} for d, c, v in candidates
                        ],
                    }
                    for name in "ab"
                ],
            }
        )
    )
    assert single.choice == several.choice
    assert (single.costs, several.costs) == ({"cost": 40}, {"params": 40})


def test_the_budget_is_used_to_the_last_unit_and_not_beyond() -> None:
    items = [[(8, 8, 8.0), (16, 16, 16.0)]] * 3
    assert solve(one_budget(40, *items)).costs == {"cost": 40}
    assert solve(one_budget(39, *items)).costs == {"cost": 32}


def test_of_equal_values_the_smaller_cost_wins_then_the_smaller_dim_of_the_first_item() -> None:
    assert solve(one_budget(9, [(1, 5, 1.0), (2, 4, 1.0)])).choice == {"a": 2}
    tied = [(16, 3, 2.0), (8, 2, 1.0)]
    assert solve(one_budget(5, tied, tied)).choice == {"a": 8, "b": 16}


def test_the_order_of_candidates_and_of_addition_does_not_matter() -> None:
    # In floating point, 0.1 + 0.2 + 0.3 and 0.3 + 0.2 + 0.1 differ. The choice must be the same.
    values = [0.1, 0.2, 0.3, 0.7, 1e-3]
    items = [[(d, 10 - d, v), (d + 8, 3, v)] for d, v in enumerate(values)]
    choice = solve(one_budget(100, *items)).choice
    mirrored = solve(one_budget(100, *[item[::-1] for item in items[::-1]])).choice
    assert list(choice.values()) == list(mirrored.values())[::-1]


def test_values_of_any_magnitude_are_told_apart() -> None:
    for scale in (1e-300, 1.0, 1e300):
        items = [[(1, 1, scale), (2, 1, scale * (1 + 1e-12))]] * 4
        solution = solve(one_budget(4, *items))
        assert set(solution.choice.values()) == {2}
        assert math.isfinite(solution.value)


def test_a_hard_problem_ends_with_an_honest_gap() -> None:
    # Subset sums of large random numbers: every choice is on the frontier.
    rng = np.random.default_rng(0)
    items = [
        [(d, int(c), float(c)) for d, c in enumerate(rng.integers(1, 10**12, 4))] for _ in range(14)
    ]
    p = one_budget(8 * 10**12, *items)
    solution = solve(p)
    assert solution.costs["cost"] <= 8 * 10**12
    assert solution.value <= 8e12 <= solution.value + solution.gap * (1 + 1e-9)


@pytest.mark.parametrize(
    ("budgets", "sentence"),
    [
        (
            {"params": 3},
            "params <= 3 cannot be met: the smallest feasible params is 4; .*: a 2, b 2$",
        ),
        ({"params": 9, "kv": 1}, "kv <= 1 .* smallest feasible kv with params <= 9 is 2"),
        ({"params": 6, "kv": 4}, "kv <= 4 .* smallest feasible kv with params <= 6 is 5"),
    ],
)
def test_an_infeasible_budget_is_explained(budgets: dict[str, int], sentence: str) -> None:
    # Each candidate is cheap either in parameters or in KV.
    candidates = [
        {"dim": 1, "value": 1.0, "costs": {"params": 2, "kv": 4}},
        {"dim": 2, "value": 1.0, "costs": {"params": 4, "kv": 1}},
    ]
    items = [
        {
            "name": name,
            "candidates": [
                c | {"costs": {k: v for k, v in c["costs"].items() if k in budgets}}
                for c in candidates
            ],
        }
        for name in "ab"
    ]
    with pytest.raises(PlanError, match=sentence):
        solve(problem({"budgets": budgets, "items": items}))

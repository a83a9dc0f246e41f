"""Why a plan leaves part of a budget unused."""

import numpy as np
import pytest

from vllm_gac.planning.binding import limited_by, tight
from vllm_gac.planning.knapsack import choose


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        # Larger candidates fit into the second budget and exceed the first.
        ({"a": 10, "b": 100}, {"a": ["a"], "b": ["a"]}),
        ({"a": 100, "b": 5}, {"a": ["b"], "b": ["b"]}),
        # Neither budget has room for the next candidate.
        ({"a": 14, "b": 6}, {"a": ["a"], "b": ["b"]}),
    ],
)
def test_the_budget_in_the_way_is_named(
    limits: dict[str, int], expected: dict[str, list[str]]
) -> None:
    costs = [np.array([[0, 0], [5, 2], [10, 5]])] * 2
    values = [np.array([0.0, 2.0, 3.0])] * 2
    assert limited_by(costs, values, [1, 1], limits) == expected


def test_only_candidates_that_use_more_of_a_budget_tell_why_it_is_left() -> None:
    costs, values = [np.array([[0, 0], [9, 0], [0, 9]])], [np.array([0.0, 1.0, 1.0])]
    assert limited_by(costs, values, [0], {"a": 5, "b": 5}) == {"a": ["a"], "b": ["b"]}
    costs = [np.array([[0, 0], [9, 1], [1, 9]])]
    assert limited_by(costs, values, [0], {"a": 5, "b": 5}) == {"a": ["b"], "b": ["a"]}
    costs = [np.array([[0, 0], [9, 0], [9, 0]])]
    assert limited_by(costs, values, [0], {"a": 5, "b": 5}) == {"a": ["a"], "b": []}


def test_where_nothing_is_better_no_budget_binds() -> None:
    costs, values = [np.array([[1, 1], [9, 9]])], [np.array([3.0, 3.0])]
    assert limited_by(costs, values, [0], {"a": 5, "b": 5}) == {"a": [], "b": []}


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"a": 19, "b": 10}, {"a": 0}),
        ({"a": 20, "b": 9}, {"b": 1}),
        ({"a": 19, "b": 9}, {"a": 0, "b": 1}),
        ({"a": 20, "b": 10}, {"a": 0}),
    ],
)
def test_a_budget_is_tight_if_a_choice_exceeds_it(
    limits: dict[str, int], expected: dict[str, int]
) -> None:
    assert tight([np.array([[0, 0], [10, 5]])] * 2, limits) == expected


@pytest.mark.parametrize("seed", range(20))
def test_the_best_choice_within_tight_budgets_is_the_best_within_all(seed: int) -> None:
    random = np.random.default_rng(seed)
    costs = [random.integers(0, 30, (8, 3)) for _ in range(4)]
    values = [random.integers(0, 50, 8).astype(float) for _ in range(4)]
    limits = dict(zip("abc", random.integers(60, 130, 3).tolist(), strict=True))
    columns = tight(costs, limits)
    few = [cost[:, list(columns.values())] for cost in costs]

    def best(costs: list[np.ndarray], limits: dict[str, int]) -> float:
        positions, gap = choose(costs, values, limits)
        assert gap == 0
        return sum(float(v[p]) for v, p in zip(values, positions, strict=True))

    assert best(few, {name: limits[name] for name in columns}) == best(costs, limits)

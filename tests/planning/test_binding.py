"""Why a plan leaves part of a budget unused."""

import numpy as np
import pytest

from vllm_gac.planning.binding import limited_by


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


def test_each_budget_may_rule_out_another_candidate() -> None:
    costs = [np.array([[0, 0], [9, 0], [0, 9]])]
    values = [np.array([0.0, 1.0, 1.0])]
    assert limited_by(costs, values, [0], {"a": 5, "b": 5}) == {"a": ["b"], "b": ["a"]}


def test_where_nothing_is_better_no_budget_binds() -> None:
    costs, values = [np.array([[1, 1], [9, 9]])], [np.array([3.0, 3.0])]
    assert limited_by(costs, values, [0], {"a": 5, "b": 5}) == {"a": [], "b": []}

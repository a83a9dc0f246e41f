"""The values that plan.json and the input of `vllm-gac solve` may hold."""

import copy
from typing import Any

import pytest

from tests.support.model_files import gac_config
from vllm_gac.errors import PlanError
from vllm_gac.layout.schema import validate
from vllm_gac.planning.knapsack.problem import KnapsackProblem
from vllm_gac.planning.plan_file import Plan

PLAN: dict[str, Any] = {
    "version": 1,
    "tool_version": "0",
    "model_config_sha256": "0" * 64,
    "methods": ["heads"],
    "align": "minimal",
    "param_ratio": 0.8,
    "kv_ratio": 1,
    "parameters": {"dense": 10, "allowed": 8, "used": 8},
    "kv_elements": {"dense": 10, "allowed": 10, "used": 10},
    "layers": gac_config()["gac"]["layers"],
}


def test_a_plan_survives_being_written_and_read() -> None:
    plan = validate(Plan, PLAN, "plan.json")
    assert validate(Plan, plan.model_dump(mode="json"), "plan.json") == plan


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 2}, "plan.json: version: this release reads format version 1"),
        ({"align": "best"}, "plan.json: align: "),
        ({"methods": ["magic"]}, "plan.json: methods.0: "),
        ({"param_ratio": 0}, "plan.json: param_ratio: "),
        ({"param_ratio": "0.8"}, "plan.json: param_ratio: "),
        ({"param_ratios": 0.8}, "plan.json: param_ratios: unknown key"),
        ({"layers": []}, "plan.json: layers: "),
        ({"parameters": {"dense": 10, "allowed": 8, "used": -1}}, "plan.json: parameters.used: "),
    ],
)
def test_a_bad_plan_is_refused_naming_the_key(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        validate(Plan, PLAN | changes, "plan.json", PlanError)


PROBLEM: dict[str, Any] = {
    "budget": 300,
    "items": [{"name": "a", "candidates": [{"dim": 112, "cost": 112, "value": 5}]}],
}


def without(raw: dict[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in raw.items() if key not in names}


def candidate(**changes: Any) -> dict[str, Any]:
    raw = copy.deepcopy(PROBLEM)
    raw["items"][0]["candidates"][0] |= changes
    return raw


def test_an_integer_is_a_value() -> None:
    assert validate(KnapsackProblem, PROBLEM, "p.json").items[0].candidates[0].value == 5.0


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (without(PROBLEM, "budget"), "exactly one of 'budget' and 'budgets'"),
        (PROBLEM | {"budgets": {"kv": 1}}, "exactly one of 'budget' and 'budgets'"),
        (without(PROBLEM, "budget") | {"budgets": {}}, "'budgets' is empty"),
        (without(PROBLEM, "budget") | {"budgets": {"kv": 1}}, "item 'a', dim 112: .*'costs'"),
        (PROBLEM | {"items": []}, "items: "),
        (PROBLEM | {"items": PROBLEM["items"] * 2}, "item name 'a' appears 2 times"),
        (PROBLEM | {"items": [{"name": "a", "candidates": []}]}, r"items\.0\.candidates: "),
        (PROBLEM | {"budget": -1}, "budget: "),
        (PROBLEM | {"budget": 1.5}, "budget: "),
        (PROBLEM | {"budget": 2**60}, "budget: "),
        (PROBLEM | {"budget": True}, "budget: "),
        (candidate(cost=-1), r"items\.0\.candidates\.0\.cost: "),
        (candidate(cost=None), "item 'a', dim 112: with 'budget' a candidate needs 'cost'"),
        (candidate(value="5"), r"items\.0\.candidates\.0\.value: "),
        (candidate(value=float("inf")), r"items\.0\.candidates\.0\.value: "),
        (candidate(value=1e308), "value: must be between -1e[+]302 and 1e[+]302, got 1e[+]308"),
        (candidate(costs={"kv": 1}), "'cost' and no 'costs'"),
        (candidate(price=1), r"items\.0\.candidates\.0\.price: "),
    ],
)
def test_a_bad_problem_is_refused_naming_the_key(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        validate(KnapsackProblem, raw, "p.json", PlanError)


def test_costs_must_be_those_of_the_budgets() -> None:
    raw = candidate(cost=None, costs={"params": 1})
    raw = without(raw, "budget") | {"budgets": {"kv": 1}}
    with pytest.raises(PlanError, match=r"costs for \['params'\], budgets are \['kv'\]"):
        validate(KnapsackProblem, raw, "p.json", PlanError)

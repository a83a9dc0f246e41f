"""The values that plan.json may hold."""

from typing import Any

import pytest

from tests.support.model_files import gac_config
from vllm_gac.errors import PlanError
from vllm_gac.layout.schema import validate
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


@pytest.mark.parametrize("align", ["none", "minimal", "measured", "optimal", "predefined"])
def test_a_plan_survives_being_written_and_read(align: str) -> None:
    plan = validate(Plan, PLAN | {"align": align}, "plan.json")
    assert validate(Plan, plan.model_dump(mode="json"), "plan.json") == plan


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 2}, "plan.json: version: "),
        ({"align": "best"}, "plan.json: align: "),
        ({"methods": ["magic"]}, "plan.json: methods.0: "),
        ({"param_ratio": 0}, "plan.json: param_ratio: "),
        ({"param_ratio": "0.8"}, "plan.json: param_ratio: "),
        ({"param_ratios": 0.8}, "plan.json: param_ratios: "),
        ({"layers": []}, "plan.json: layers: "),
        ({"parameters": {"dense": 10, "allowed": 8, "used": -1}}, "plan.json: parameters.used: "),
    ],
)
def test_a_bad_plan_is_refused_naming_the_key(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        validate(Plan, PLAN | changes, "plan.json", PlanError)

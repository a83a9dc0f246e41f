"""plan.json: the dims of every layer, and the budgets that they were chosen for.

Budgets are exact integers. No plan exceeds them.
"""

import math
from collections.abc import Sequence
from dataclasses import fields, replace
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from vllm_gac.checkpoint.open import Checkpoint
from vllm_gac.checkpoint.untrusted_files import read_json
from vllm_gac.compression.methods.registry import METHODS, methods_of, usual_methods
from vllm_gac.errors import CheckpointError, PlanError
from vllm_gac.layout.dims import LayerLayout, ModelLayout, layer_of
from vllm_gac.layout.schema import (
    Count,
    LayerSection,
    Ratio,
    Strategy,
    StrictModel,
    Version,
    validate,
)
from vllm_gac.version import version


def _known_method(name: str) -> str:
    if name not in METHODS:
        raise ValueError(f"expected one of {', '.join(METHODS)}")
    return name


class PlanBudget(StrictModel):
    """A budget in exact units: the amount in the dense model, the limit, and the plan's amount."""

    dense: Count
    allowed: Count
    used: Count


class Plan(StrictModel):
    """plan.json: the chosen dims of every layer, and the budgets and methods of the choice."""

    version: Version
    tool_version: str
    # Of the dense model's config.json, and of its norms and a sample of its other weights. A plan
    # is refused for another model.
    model_config_sha256: str
    model_weights_sha256: str | None = None
    methods: list[Annotated[str, AfterValidator(_known_method)]]
    # What it was chosen by does not matter to its dims: before, there were more strategies.
    align: Literal[Strategy, "optimal", "predefined"]
    param_ratio: Ratio
    kv_ratio: Ratio
    parameters: PlanBudget
    # KV cache elements per token, summed over layers.
    kv_elements: PlanBudget
    # The predicted time of all decoder layers in a mean step, if the deployment is known.
    nanoseconds: PlanBudget | None = None
    # Nats per token.
    expected_loss: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    layers: Annotated[list[LayerSection], Field(min_length=1, max_length=1024)]
    notes: dict[str, Any] = Field(default_factory=dict)


def dense_plan(model: Checkpoint, methods: Sequence[str] | None = None) -> Plan:
    """The plan that changes nothing in the dense `model`, and names `methods` or the usual ones."""
    methods = usual_methods() if methods is None else methods
    dense = model.layout
    parameters = exact_budget(1.0, dense.parameters)
    kv_elements = exact_budget(1.0, dense.kv_elements)
    return Plan(
        version=1,
        tool_version=version(),
        model_config_sha256=model.config_sha256,
        model_weights_sha256=model.weights_sha256,
        methods=[m for m in METHODS if m in methods],
        align="minimal",
        param_ratio=1.0,
        kv_ratio=1.0,
        parameters=parameters.model_copy(update={"used": dense.parameters}),
        kv_elements=kv_elements.model_copy(update={"used": dense.kv_elements}),
        layers=[LayerSection.model_validate(layer.section()) for layer in dense.layers],
        notes={"planner": "dense"},
    )


def read_plan(path: Path, model: Checkpoint) -> Plan:
    """Read the plan in the JSON file `path`.

    Raises:
        PlanError: If the plan is malformed, or is not for `model`.
    """
    plan = validate(Plan, read_json(path, PlanError), str(path), PlanError)
    check_plan(plan, model, str(path))
    return plan


def check_plan(plan: Plan, model: Checkpoint, where: str = "plan") -> None:
    """Check that `plan` is for `model`.

    Raises:
        PlanError: If it is not; the message calls the plan `where`.
    """
    for what, digest, own in (
        ("config.json", plan.model_config_sha256, model.config_sha256),
        ("weights", plan.model_weights_sha256, model.weights_sha256),
    ):
        if digest not in (None, own):
            raise PlanError(f"{where}: made for another model ({what}: not {model.directory}'s)")
    planned_layout(model, plan, where)


def planned_layout(model: Checkpoint, plan: Plan, where: str = "plan") -> ModelLayout:
    """The layout of `model` after compression by `plan`.

    Args:
        model: The dense model.
        plan: The plan.
        where: What error messages call the plan.

    Raises:
        PlanError: If no method that the plan names can make its layers, or if the plan's numbers
            about its budgets are wrong.
    """
    dense = model.layout
    if len(plan.layers) != len(dense.layers):
        raise PlanError(
            f"{where}: {len(plan.layers)} layers, {model.directory} has {len(dense.layers)}"
        )
    try:
        layers = tuple(
            layer_of(section, model.config, index, dense.head_dim, f"{where}: layers.{index}")
            for index, section in enumerate(plan.layers)
        )
    except CheckpointError as e:
        raise PlanError(str(e)) from e
    for index, layer in enumerate(layers):
        _check_reachable(dense, index, layer, plan.methods, f"{where}: layers.{index}")
        same_mlp = layer.intermediate_size == dense.layers[0].intermediate_size
        if model.kept is not None and (layer.ranks or not same_mlp):
            raise PlanError(f"{where}: layers.{index}: {model.directory} {model.kept}")
    layout = replace(dense, layers=layers)
    for name, ratio, budget, dense_size, used in (
        ("parameters", plan.param_ratio, plan.parameters, dense.parameters, layout.parameters),
        ("kv_elements", plan.kv_ratio, plan.kv_elements, dense.kv_elements, layout.kv_elements),
    ):
        requested = exact_budget(ratio, dense_size)
        if (budget.dense, budget.allowed) != (requested.dense, requested.allowed):
            raise PlanError(
                f"{where}: {name}: {ratio} of the model's {requested.dense} is "
                f"{requested.allowed}, it says {budget.allowed} of {budget.dense}"
            )
        if budget.used != used or used > budget.allowed:
            raise PlanError(
                f"{where}: {name}: its layers have {used}, it says {budget.used} of "
                f"{budget.allowed} allowed"
            )
    return layout


def exact_budget(ratio: float, dense: int) -> PlanBudget:
    """The budget of `ratio` times `dense`, rounded down. 0.7 is exactly 7/10, not a double."""
    return PlanBudget(dense=dense, allowed=math.floor(Fraction(str(ratio)) * dense), used=0)


def _check_reachable(
    dense: ModelLayout, index: int, layer: LayerLayout, methods: Sequence[str], where: str
) -> None:
    """Raise PlanError unless `methods` can make `layer` from dense layer `index`."""
    known = {name: method for name in METHODS for method in methods_of([name])}
    for method in known.values():
        method.check(dense, layer, where)
    for field in fields(layer):
        if getattr(layer, field.name) == getattr(dense.layers[index], field.name):
            continue
        able = [name for name, method in known.items() if field.name in method.fields]
        if not able:
            raise PlanError(f"{where}.{field.name}: no method changes it; leave it out")
        if not set(able) & set(methods):
            raise PlanError(
                f"{where}.{field.name}: only the method {' or '.join(able)} changes it, and the "
                f"plan's methods are {list(methods)}"
            )

"""plan.json: the dims of every layer, and the budgets that they were chosen for.

Budgets are exact integers. No plan exceeds them.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from vllm_gac.checkpoint.open import Checkpoint
from vllm_gac.checkpoint.strict_json import read_json
from vllm_gac.compression.methods.base import MERGEABLE
from vllm_gac.errors import CheckpointError, PlanError
from vllm_gac.layout.dims import LayerLayout, ModelLayout, layer_of
from vllm_gac.layout.schema import (
    CHANGED_BY,
    METHODS,
    USUAL_METHODS,
    Count,
    LayerSection,
    Method,
    Ratio,
    Strategy,
    StrictModel,
    Version,
    validate,
)
from vllm_gac.version import version


class PlanBudget(StrictModel):
    """A budget in exact units: the amount in the dense model, the limit, and the plan's amount."""

    dense: Count
    allowed: Count
    used: Count


class Plan(StrictModel):
    """plan.json: the chosen dims of every layer, and the budgets and methods of the choice."""

    version: Version
    tool_version: str
    # SHA-256 of the dense model's config.json. A plan is refused for another model.
    model_config_sha256: str
    methods: list[Method]
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


def dense_plan(model: Checkpoint, methods: Sequence[str] = USUAL_METHODS) -> Plan:
    """The plan that changes nothing in the dense `model`, and names `methods`."""
    dense = model.layout
    parameters = exact_budget(1.0, dense.parameters)
    kv_elements = exact_budget(1.0, dense.kv_elements)
    return Plan(
        version=1,
        tool_version=version(),
        model_config_sha256=model.config_sha256,
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
    if plan.model_config_sha256 != model.config_sha256:
        raise PlanError(
            f"{where}: made for another model (its config.json is not {model.directory}'s)"
        )
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
            layer_of(section, model.config, dense.head_dim, f"{where}: layers.{index}")
            for index, section in enumerate(plan.layers)
        )
    except CheckpointError as e:
        raise PlanError(str(e)) from e
    for index, layer in enumerate(layers):
        _check_reachable(dense, layer, f"{where}: layers.{index}")
        _check_methods(dense, layer, plan.methods, f"{where}: layers.{index}")
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


def _check_reachable(dense: ModelLayout, layer: LayerLayout, where: str) -> None:
    """Raise PlanError if no method can make `layer` from a dense one."""
    model = dense.layers[0]
    for kind, heads, size in (
        ("key", layer.key.heads, layer.key.size),
        ("value", layer.value.heads, layer.value.size),
    ):
        group = dense.num_key_value_heads / heads
        if group not in MERGEABLE or size > group * dense.head_dim:
            raise PlanError(
                f"{where}.{kind}: {heads} heads of {size} cannot be made of "
                f"{dense.num_key_value_heads} of {dense.head_dim}; at most 2 heads become one"
            )
    if dense.qk_norm and layer.key.heads != model.key.heads:
        raise PlanError(
            f"{where}.key.heads: {layer.key.heads}, but the {model.key.heads} key heads of the "
            "model are normed one by one, so that none can be merged"
        )
    if layer.query_heads != model.query_heads:
        raise PlanError(f"{where}.query_heads: no method removes query heads; leave it out")
    if layer.intermediate_size > model.intermediate_size:
        raise PlanError(
            f"{where}.intermediate_size: {layer.intermediate_size} exceeds the dense "
            f"{model.intermediate_size}"
        )
    for name, rank in layer.ranks.items():
        full = min(dense.linear_shape(layer, name))
        if rank > full:
            raise PlanError(f"{where}.ranks.{name}: {rank} exceeds the full rank {full}")


def _check_methods(
    dense: ModelLayout, layer: LayerLayout, methods: Sequence[str], where: str
) -> None:
    """Raise PlanError if `layer` needs a method that is not among `methods`."""
    for method, names in CHANGED_BY.items():
        for name in names if method not in methods else ():
            if getattr(layer, name) != getattr(dense.layers[0], name):
                raise PlanError(
                    f"{where}.{name}: only the method {method} changes it, and the plan's methods "
                    f"are {list(methods)}"
                )

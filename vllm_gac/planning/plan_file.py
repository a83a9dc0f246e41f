"""Choose every layer's dims under a parameter and a KV budget, or read a plan that did.

`uniform_plan` gives every layer the same attention and the same MLP, but for one step of width
that some layers get on top. Budgets are exact integers and never exceeded.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from vllm_gac import __version__
from vllm_gac.alignment.rules import NOT_QUANTIZED, Quantized
from vllm_gac.checkpoint.open import Checkpoint
from vllm_gac.checkpoint.strict_json import read_json
from vllm_gac.compression.methods.base import MERGEABLE
from vllm_gac.errors import CheckpointError, PlanError
from vllm_gac.layout.dims import LayerLayout, ModelLayout, layer_of
from vllm_gac.layout.schema import (
    METHODS,
    Count,
    LayerSection,
    Method,
    Ratio,
    Strategy,
    StrictModel,
    Version,
    validate,
)
from vllm_gac.layout.tensor_parallel import check_planned_for
from vllm_gac.planning.candidates import Dims, Rung, attentions, layer_at, rungs
from vllm_gac.planning.prior_losses import expected_loss


class PlanBudget(StrictModel):
    """A budget in exact units: what the dense model has, what is allowed, what the plan uses."""

    dense: Count
    allowed: Count
    used: Count


class Plan(StrictModel):
    """plan.json: the chosen dims of every layer, and what they were chosen under."""

    version: Version
    tool_version: str
    # SHA-256 of the dense model's config.json, so that a plan is not applied to another model.
    model_config_sha256: str
    methods: list[Method]
    align: Strategy
    param_ratio: Ratio
    kv_ratio: Ratio
    parameters: PlanBudget
    # KV cache elements per token, summed over layers.
    kv_elements: PlanBudget
    # Predicted time of all decoder layers in a mean step, where a profile was planned for.
    nanoseconds: PlanBudget | None = None
    # Nats per token.
    expected_loss: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    layers: Annotated[list[LayerSection], Field(min_length=1, max_length=1024)]
    notes: dict[str, Any] = Field(default_factory=dict)


def uniform_plan(
    model: Checkpoint,
    *,
    param_ratio: float,
    kv_ratio: float,
    methods: Sequence[str] = ("heads", "prune"),
    align: Strategy = "minimal",
    gpu: str | None = None,
    tensor_parallel_size: int = 1,
    quantized: Quantized = NOT_QUANTIZED,
    key_form: str = "auto",
    key_group: int | None = None,
    value_group: int | None = None,
) -> Plan:
    """The plan that keeps at most the given shares of `model`'s parameters and KV cache.

    `methods`: heads (fewer and smaller key and value heads), prune (narrower MLPs), lowrank
    (factorized linears). `align`, `gpu`, `tensor_parallel_size` and `quantized` say which dims are
    allowed (see contract.py).
    `key_form` (auto, rotary, latent) and the groups (1 or 2 heads made one; None is free)
    restrict the attention. Of all attentions that fit, with what they leave to the rest, the one
    that prior.py expects to lose least is taken. Raises PlanError naming the smallest feasible
    ratio if none fits.
    """
    if model.config.gac is not None:
        raise PlanError(f"{model.directory}: is compressed already; plan for the dense model")
    dense, dims = model.layout, Dims(align, gpu, tensor_parallel_size, quantized)
    check_planned_for(dense, tensor_parallel_size)
    kv_budget = budget_of(kv_ratio, dense.kv_elements)
    budget = budget_of(param_ratio, dense.parameters)
    choices = [dense.layers[0]]
    if "heads" in methods:
        choices = list(attentions(dense, dims, key_form, key_group, value_group))
    if not choices:
        raise PlanError(
            f"--key-form {key_form}, --key-group {key_group or 'any'}, --value-group "
            f"{value_group or 'any'}: no aligned size below {dense.head_dim} for "
            f"{dense.num_key_value_heads} KV heads; groups must divide them, and a value head "
            "must be shared by whole key heads"
        )
    fitting = [a for a in choices if a.kv_elements * len(dense.layers) <= kv_budget.allowed]
    if not fitting:
        smallest = min(a.kv_elements for a in choices) * len(dense.layers)
        raise _infeasible("--kv-ratio", kv_ratio, smallest, dense.kv_elements, methods)

    # Of attentions and rungs there may be thousands each: never all of their layers at a time.
    steps = rungs(dense, methods, dims)
    ladders = [_Ladder(dense, attention, steps, methods, dims) for attention in fitting]
    outside = dense.parameters - len(dense.layers) * _parameters(dense, dense.layers[0])
    plans = (p for ladder in ladders if (p := _climb(dense, ladder, budget.allowed - outside)))
    rated = ((expected_loss(dense, layers), layers) for layers in plans)
    best = min(rated, key=lambda pair: pair[0], default=None)
    if best is None:
        smallest = min(_parameters(dense, ladder[0]) for ladder in ladders) * len(dense.layers)
        raise _infeasible(
            "--param-ratio", param_ratio, smallest + outside, dense.parameters, methods
        )
    loss, layers = best
    layout = replace(dense, layers=tuple(layers))
    return Plan(
        version=1,
        tool_version=__version__,
        model_config_sha256=model.config_sha256,
        methods=[m for m in METHODS if m in methods],
        align=align,
        param_ratio=param_ratio,
        kv_ratio=kv_ratio,
        parameters=budget.model_copy(update={"used": layout.parameters}),
        kv_elements=kv_budget.model_copy(update={"used": layout.kv_elements}),
        layers=[LayerSection.model_validate(layer.section()) for layer in layers],
        notes={
            "planner": "uniform",
            "expected_loss": round(loss, 4),
            "limited_by": _limited_by(dense, fitting, layers[0]),
        },
    )


def read_plan(path: Path, model: Checkpoint) -> Plan:
    """The plan in the JSON file `path`. Raises PlanError if it is malformed or not for `model`."""
    plan = validate(Plan, read_json(path, PlanError), str(path), PlanError)
    if plan.model_config_sha256 != model.config_sha256:
        raise PlanError(
            f"{path}: made for another model (its config.json is not {model.directory}'s)"
        )
    planned_layout(model, plan, str(path))
    return plan


def planned_layout(model: Checkpoint, plan: Plan, where: str = "plan") -> ModelLayout:
    """The layout that `plan` makes of `model`.

    Raises PlanError naming `where` if no method leads there, or none of those that the plan names,
    or if the plan's own account of its budgets is wrong.
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
    for name, ratio, budget, whole, used in (
        ("parameters", plan.param_ratio, plan.parameters, dense.parameters, layout.parameters),
        ("kv_elements", plan.kv_ratio, plan.kv_elements, dense.kv_elements, layout.kv_elements),
    ):
        asked = budget_of(ratio, whole)
        if (budget.dense, budget.allowed) != (asked.dense, asked.allowed):
            raise PlanError(
                f"{where}: {name}: {ratio} of the model's {asked.dense} is {asked.allowed}, it "
                f"says {budget.allowed} of {budget.dense}"
            )
        if budget.used != used or used > budget.allowed:
            raise PlanError(
                f"{where}: {name}: its layers have {used}, it says {budget.used} of "
                f"{budget.allowed} allowed"
            )
    return layout


def budget_of(ratio: float, dense: int) -> PlanBudget:
    """`ratio` of `dense`, rounded down; a ratio of 0.7 is seven tenths, not the nearest double."""
    return PlanBudget(dense=dense, allowed=math.floor(Fraction(str(ratio)) * dense), used=0)


@dataclass(frozen=True, slots=True)
class _Ladder:
    """Layers of one attention, from the least of the rest to the whole; made when asked for."""

    dense: ModelLayout
    attention: LayerLayout
    steps: Sequence[Rung]
    methods: Sequence[str]
    dims: Dims

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, index: int) -> LayerLayout:
        return layer_at(self.dense, self.attention, self.steps[index], self.methods, self.dims)


def _climb(dense: ModelLayout, ladder: _Ladder, allowed: int) -> list[LayerLayout] | None:
    """Every layer on the highest rung that all can have, then as many as fit one rung higher.

    `allowed` is for all layers; None if it does not suffice for the lowest rung.
    """
    count = len(dense.layers)
    sizes = cache(lambda rung: _parameters(dense, ladder[rung]))
    rung = bisect_right(range(len(ladder)), allowed // count, key=sizes) - 1
    if rung < 0:
        return None
    layers = [ladder[rung]] * count
    if rung + 1 < len(ladder):
        raised = (allowed - count * sizes(rung)) // (sizes(rung + 1) - sizes(rung))
        # The last ones: in the demo model that is worth 1.4 % of perplexity.
        layers[count - raised :] = [ladder[rung + 1]] * raised
    return layers


def _limited_by(
    dense: ModelLayout, attentions: Sequence[LayerLayout], chosen: LayerLayout
) -> dict[str, list[str]]:
    """As binding.py: the budgets that keep a uniform plan from using more of each budget.

    `attentions` are all that the KV budget allows; the layer that was `chosen` has one of them.
    """
    whole, cached = dense.layers[0], chosen.kv_elements
    by_cache = ["kv_elements"] if cached < whole.kv_elements else []
    larger = any(attention.kv_elements > cached for attention in attentions)
    narrower = chosen.intermediate_size < whole.intermediate_size or bool(chosen.ranks)
    return {
        "parameters": ["parameters"] if narrower else by_cache,
        "kv_elements": ["parameters"] if larger else by_cache,
    }


def _parameters(dense: ModelLayout, layer: LayerLayout) -> int:
    """Parameters of a layer, as `ModelLayout.parameters` counts them."""
    model = replace(dense, layers=(layer,))
    return sum(
        math.prod(shape) for name, shape in model.layer_tensors(0) if "rope_inv_freq" not in name
    )


def _check_reachable(dense: ModelLayout, layer: LayerLayout, where: str) -> None:
    """Raise PlanError unless the methods can make `layer` of a dense one."""
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
    """Raise PlanError if a layer of a dense model needs a method that is not among `methods`."""
    model = dense.layers[0]
    for method, key, changed in (
        ("heads", "key", layer.key != model.key),
        ("heads", "value", layer.value != model.value),
        ("prune", "intermediate_size", layer.intermediate_size != model.intermediate_size),
        ("lowrank", "ranks", bool(layer.ranks)),
    ):
        if changed and method not in methods:
            raise PlanError(
                f"{where}.{key}: only the method {method} changes it, and the plan's methods are "
                f"{list(methods)}"
            )


def _infeasible(
    flag: str, asked: float, smallest: int, dense: int, methods: Sequence[str]
) -> PlanError:
    needed = math.ceil(10_000 * smallest / dense) / 10_000
    return PlanError(
        f"{flag} {asked}: not feasible with --method {','.join(methods)}; "
        f"at least {needed} is needed"
    )

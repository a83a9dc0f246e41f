"""The plan that is expected to lose least within the budgets: one exact multi-choice knapsack."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from vllm_gac import __version__
from vllm_gac.checkpoint.open import Checkpoint
from vllm_gac.compression.statistics_file import check_gradients, check_stats, methods_of
from vllm_gac.errors import PlanError
from vllm_gac.gpu.latency.layer import layer_microseconds
from vllm_gac.layout.dims import LayerLayout, ModelLayout
from vllm_gac.layout.schema import METHODS, LayerSection
from vllm_gac.layout.tensor_parallel import check_planned_for
from vllm_gac.planning.binding import limited_by
from vllm_gac.planning.candidates import Dims
from vllm_gac.planning.knapsack import choose
from vllm_gac.planning.knapsack.instance import Ints
from vllm_gac.planning.knapsack_items import Item, Latency, items, part_parameters
from vllm_gac.planning.losses import Curve, Losses, Sensitivity, read_losses
from vllm_gac.planning.plan_file import Plan, PlanBudget, budget_of
from vllm_gac.planning.proportional import (
    LinearLosses,
    LossScores,
    Scores,
    proportional_layers,
    read_fisher_scores,
    within_window,
)

# Fused GEMMs make the time of a layer a little more or less than that of its parts. A plan that
# comes out too slow is made again under a tighter budget, at most so often.
_ATTEMPTS = 8


@dataclass(frozen=True, slots=True)
class Asked:
    """What a plan is to keep, and what it may be made of.

    Ratios are shares of the dense model's parameters and KV cache. `microseconds` is a budget
    for all decoder layers in a mean step of `latency`'s batch mix. `objective` is concave (the
    losses), or the paper's linear one, with scores by these losses or by Fisher information
    (proportional.py). `sensitivity` is what the losses of low rank come from (losses.py).
    `key_form` (auto, rotary, latent) and the groups (1 or 2 heads made one; None is free)
    restrict the attention.
    """

    param_ratio: float = 1.0
    kv_ratio: float = 1.0
    methods: Sequence[str] = ("heads", "prune")
    dims: Dims = field(default_factory=lambda: Dims("minimal"))
    key_form: str = "auto"
    key_group: int | None = None
    value_group: int | None = None
    latency: Latency | None = None
    microseconds: float | None = None
    objective: Literal["concave", "linear", "fisher"] = "concave"
    sensitivity: Sensitivity = "probe"

    @property
    def everything(self) -> bool:
        """Whether nothing is to be taken away."""
        return self.param_ratio == self.kv_ratio == 1 and self.microseconds is None

    @property
    def needs_gradients(self) -> str | None:
        """The option that needs the gradients of the loss, if one does."""
        if self.sensitivity == "kfac":
            return "--sensitivity kfac"
        return "--objective fisher" if self.objective == "fisher" else None

    def record(self) -> dict[str, Any]:
        """This as JSON values, by which a resumed run knows that it is the same."""
        values = asdict(replace(self, latency=None)) | {"methods": list(self.methods)}
        if self.latency is not None:
            values["latency"] = {"gpu": self.latency.profile.gpu, **asdict(self.latency.mix)}
        return values


def measured_plan(model: Checkpoint, stats: Path, asked: Asked) -> Plan:
    """`best_plan` by the file `stats` of calibrate.py. Raises CheckpointError as `check_stats`."""
    if asked.sensitivity == "kfac" and "lowrank" not in asked.methods:
        raise PlanError("--sensitivity kfac is of the ranks of linears; add lowrank to --method")
    metadata = check_stats(stats, model.layout, model.config_sha256)
    if asked.needs_gradients:
        check_gradients(stats, metadata, asked.needs_gradients)
    needs_probes = asked.sensitivity == "probe" or set(asked.methods) != {"lowrank"}
    if needs_probes and metadata["probe_tokens"] == "0":
        raise PlanError(f"{stats}: no sensitivities were measured; calibrate with --probe-tokens")
    if missing := set(asked.methods) - set(methods_of(metadata)):
        raise PlanError(
            f"{stats}: calibrated for {metadata['methods']}, not for {', '.join(sorted(missing))}; "
            "calibrate again with --method"
        )
    if int(metadata["value_group"]) == 1:  # nothing is known of merged heads
        asked = replace(asked, value_group=1, key_group=1)
    losses = read_losses(stats, model.layout, metadata, asked.sensitivity)
    scores = read_fisher_scores(stats) if asked.objective == "fisher" else None
    known = ("tokens", "tokens_sha256", "sequence_length", "probe_tokens", "gradient_tokens")
    calibration = {key: metadata[key] for key in known if key in metadata}
    return best_plan(model, losses, asked, {"calibration": calibration}, scores)


def best_plan(
    model: Checkpoint,
    losses: Losses,
    asked: Asked,
    notes: Mapping[str, Any] | None = None,
    scores: Scores | None = None,
) -> Plan:
    """The plan for the dense `model` that loses least by `losses`, within every budget.

    The objectives linear and fisher go by `scores`, by default those of the losses. Raises
    PlanError if no plan fits, with the least that would.
    """
    if model.config.gac is not None:
        raise PlanError(f"{model.directory}: is compressed already; plan for the dense model")
    dense = model.layout
    check_planned_for(dense, asked.dims.tensor_parallel_size)
    choices = _items(dense, asked)
    parameters = budget_of(asked.param_ratio, dense.parameters)
    kv_elements = budget_of(asked.kv_ratio, dense.kv_elements)
    problem = _problem(dense, losses, scores, asked, choices)
    found = _within_time(problem, asked, parameters, kv_elements)
    layers = found.layers
    layout = replace(dense, layers=tuple(layers))
    return Plan(
        version=1,
        tool_version=__version__,
        model_config_sha256=model.config_sha256,
        methods=[m for m in METHODS if m in asked.methods],
        align=asked.dims.strategy,
        param_ratio=asked.param_ratio,
        kv_ratio=asked.kv_ratio,
        parameters=parameters.model_copy(update={"used": layout.parameters}),
        kv_elements=kv_elements.model_copy(update={"used": layout.kv_elements}),
        nanoseconds=_time_budget(dense, layout, asked),
        expected_loss=round(found.loss, 6),
        layers=[LayerSection.model_validate(layer.section()) for layer in layers],
        notes={
            "planner": "knapsack",
            "objective": asked.objective,
            "sensitivity": asked.sensitivity,
            "gap": found.gap,
            "limited_by": found.limited_by,
        }
        | dict(notes or {}),
    )


def check_feasible(model: Checkpoint, asked: Asked) -> None:
    """Raise PlanError if no plan can be within the budgets, whatever is measured later."""
    dense = model.layout
    check_planned_for(dense, asked.dims.tensor_parallel_size)
    choices = _items(dense, asked)
    parameters = budget_of(asked.param_ratio, dense.parameters)
    kv_elements = budget_of(asked.kv_ratio, dense.kv_elements)
    limits = _limits(dense, asked, choices, parameters, kv_elements)
    _check_feasible(dense, asked, choices, _left(dense, choices, limits))


def _items(dense: ModelLayout, asked: Asked) -> list[Item]:
    found = items(
        dense,
        asked.methods,
        asked.dims,
        key_form=asked.key_form,
        key_group=asked.key_group,
        value_group=asked.value_group,
        latency=asked.latency,
        timed=asked.microseconds is not None,
    )
    for item in found:
        if not item.layers:
            raise PlanError(
                f"--key-form {asked.key_form}, --key-group {asked.key_group or 'any'}, "
                f"--value-group {asked.value_group or 'any'}: no aligned size below "
                f"{dense.head_dim} for {dense.num_key_value_heads} KV heads; groups must divide "
                "them, and a value head must be shared by whole key heads"
            )
    return found


@dataclass(frozen=True, slots=True)
class _Found:
    """The best layers, what they lose, how much less another choice might lose at most, and for
    each budget the budgets that keep the plan from using more of it."""

    layers: list[LayerLayout]
    loss: float
    gap: float
    limited_by: Mapping[str, list[str]]


@dataclass(frozen=True, slots=True)
class _Problem:
    """All of a plan's knapsack but its limits: one entry for each item in each layer.

    `lost` is what every candidate loses, `values` what they are chosen by, `allowed` which may be.
    """

    dense: ModelLayout
    choices: Sequence[Item]
    costs: Sequence[Ints]
    lost: Sequence[Curve]
    values: Sequence[Curve]
    allowed: Sequence[NDArray[np.intp]]


def _problem(
    dense: ModelLayout,
    losses: Losses,
    scores: Scores | None,
    asked: Asked,
    choices: Sequence[Item],
) -> _Problem:
    count = len(dense.layers)
    costs = [above for item in choices for above in [item.costs - item.costs.min(0)] * count]
    lost = objective = _of_every_layer(dense, losses, choices)
    allowed: Sequence[NDArray[np.intp]] = [np.arange(len(loss)) for loss in lost]
    if asked.objective != "concave":
        scores = scores or LossScores(losses)
        objective = _of_every_layer(dense, LinearLosses(losses, scores), choices)
        allowed = _windows(dense, scores, asked, choices)
    return _Problem(dense, choices, costs, lost, [-loss for loss in objective], allowed)


def _of_every_layer(dense: ModelLayout, losses: Losses, choices: Sequence[Item]) -> list[Curve]:
    return [item.losses(losses, index) for item in choices for index in range(len(dense.layers))]


def _within_time(
    problem: _Problem, asked: Asked, parameters: PlanBudget, kv_elements: PlanBudget
) -> _Found:
    """What is solved; the time is checked on whole layers."""
    limits = _limits(problem.dense, asked, problem.choices, parameters, kv_elements)
    for _ in range(_ATTEMPTS):
        found = _solve(problem, asked, limits)
        if asked.microseconds is None or asked.latency is None:
            return found
        over = _nanoseconds(problem.dense, found.layers, asked.latency) - 1000 * asked.microseconds
        if over <= 0:
            return found
        limits["nanoseconds"] -= math.ceil(over)
    raise PlanError(
        f"--latency {asked.microseconds:.0f}: a plan of its parts fits, none of whole layers was "
        f"found in {_ATTEMPTS} attempts; allow more"
    )


def _limits(
    dense: ModelLayout,
    asked: Asked,
    choices: Sequence[Item],
    parameters: PlanBudget,
    kv_elements: PlanBudget,
) -> dict[str, int]:
    """What is left for the items once everything that is no item's has been counted."""
    count, layer = len(dense.layers), dense.layers[0]
    ours = sum(part_parameters(dense, layer, item.prefix) for item in choices)
    caches = any(item.prefix == "self_attn." for item in choices)
    limits = {
        "parameters": parameters.allowed - (dense.parameters - count * ours),
        "kv_elements": kv_elements.allowed - (0 if caches else dense.kv_elements),
    }
    if asked.microseconds is not None and asked.latency is not None:
        whole = _nanoseconds(dense, dense.layers, asked.latency)
        limits["nanoseconds"] = math.floor(1000 * asked.microseconds - whole)
    return limits


def _solve(problem: _Problem, asked: Asked, limits: Mapping[str, int]) -> _Found:
    dense, choices = problem.dense, problem.choices
    left = _left(dense, choices, limits)
    _check_feasible(dense, asked, choices, left)
    costs = [cost[a] for cost, a in zip(problem.costs, problem.allowed, strict=True)]
    values = [value[a] for value, a in zip(problem.values, problem.allowed, strict=True)]
    budgets = dict(zip(limits, left.tolist(), strict=True))
    positions, gap = choose(costs, values, budgets)
    chosen = [int(a[position]) for a, position in zip(problem.allowed, positions, strict=True)]
    layers, count = list(dense.layers), len(dense.layers)
    for number, position in enumerate(chosen):
        item, index = choices[number // count], number % count
        layers[index] = item.put(layers[index], item.layers[position])
    loss = math.fsum(loss[p] for loss, p in zip(problem.lost, chosen, strict=True))
    return _Found(layers, loss, gap, limited_by(costs, values, positions, budgets))


def _windows(
    dense: ModelLayout, scores: Scores, asked: Asked, choices: Sequence[Item]
) -> list[NDArray[np.intp]]:
    """Of every item in every layer the candidates about the proportional dims; all if none is."""
    near = proportional_layers(
        dense,
        scores,
        asked.methods,
        "latent" if asked.key_form == "latent" else "rotary",
        budget_of(asked.param_ratio, dense.parameters).allowed,
        budget_of(asked.kv_ratio, dense.kv_elements).allowed,
    )
    found = []
    for item in choices:
        for layer in near:
            about = [within_window(dense, c, layer, item.prefix) for c in item.layers]
            found.append(np.flatnonzero(about if any(about) else np.ones(len(about))))
    return found


def _left(dense: ModelLayout, choices: Sequence[Item], limits: Mapping[str, int]) -> Ints:
    """[budgets]: what the least of every item leaves; time is counted from the dense model's."""
    least = sum(item.costs.min(0) for item in choices)
    left: Ints = np.array(list(limits.values())) - len(dense.layers) * least
    return left


def _check_feasible(dense: ModelLayout, asked: Asked, choices: Sequence[Item], left: Ints) -> None:
    """Raise PlanError naming the option whose budget nothing meets, and the least that it takes."""
    methods = ",".join(asked.methods)
    for flag, ratio, whole, budget in (
        ("--kv-ratio", asked.kv_ratio, dense.kv_elements, 1),
        ("--param-ratio", asked.param_ratio, dense.parameters, 0),
    ):
        if (short := -int(left[budget])) > 0:
            needed = math.floor(Fraction(str(ratio)) * whole) + short
            raise PlanError(
                f"{flag} {ratio}: not feasible with --method {methods}; at least "
                f"{math.ceil(10_000 * needed / whole) / 10_000} is needed"
                + _what_binds(dense, choices, budget, needed, whole)
            )
    if len(left) > 2 and left[2] < 0 and asked.microseconds is not None:
        needed_time = asked.microseconds - int(left[2]) / 1000
        raise PlanError(
            f"--latency {asked.microseconds:.0f}: not feasible with --method {methods}; at least "
            f"{needed_time:.0f} microseconds are needed"
        )


def _what_binds(
    dense: ModelLayout, choices: Sequence[Item], budget: int, needed: int, whole: int
) -> str:
    """What the least of every part adds up to, as shares of the dense model."""
    count = len(dense.layers)
    parts = {item.prefix.strip("."): count * int(item.costs[:, budget].min()) for item in choices}
    parts["what is not compressed"] = needed - sum(parts.values())
    shares = (f"{name} {part / whole:.3f}" for name, part in parts.items() if part)
    return f" ({', '.join(shares)})"


def _nanoseconds(dense: ModelLayout, layers: Sequence[LayerLayout], latency: Latency) -> float:
    """Predicted time of all decoder layers in a mean step."""
    times: dict[str, float] = {}
    total = 0.0
    for layer in layers:
        key = str(layer)
        if key not in times:
            times[key] = layer_microseconds(dense, layer, latency.mix, latency.profile)
        total += times[key]
    return 1000 * total


def dense_microseconds(dense: ModelLayout, latency: Latency) -> float:
    """Predicted time of all decoder layers of the dense model in a mean step."""
    return _nanoseconds(dense, dense.layers, latency) / 1000


def _time_budget(dense: ModelLayout, layout: ModelLayout, asked: Asked) -> PlanBudget | None:
    if asked.latency is None:
        return None
    before = round(_nanoseconds(dense, dense.layers, asked.latency))
    used = math.ceil(_nanoseconds(dense, layout.layers, asked.latency))
    allowed = used if asked.microseconds is None else math.floor(1000 * asked.microseconds)
    return PlanBudget(dense=before, allowed=max(used, allowed), used=used)

"""The plan with the least loss within the budgets, or the least time or bytes within a loss."""

import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import chain, combinations
from pathlib import Path
from typing import Any

from vllm_gac.checkpoint.hub import model_directory
from vllm_gac.checkpoint.open import Checkpoint, open_dense
from vllm_gac.compression.methods.registry import METHODS, methods_of
from vllm_gac.compression.statistics_file import Statistics, open_statistics
from vllm_gac.errors import PlanError
from vllm_gac.gpu.latency.layer import COMPRESSED, DENSE_WITH_GAC
from vllm_gac.layout.dims import LayerLayout, ModelLayout
from vllm_gac.layout.schema import LayerSection
from vllm_gac.planning.expected_loss import interval
from vllm_gac.planning.losses import (
    Losses,
    loss_by_sequence,
    loss_of,
    prior_losses,
    read_losses,
    with_fp8_cache,
)
from vllm_gac.planning.plan_file import Plan, PlanBudget, planned_layout
from vllm_gac.planning.problem import Problem, Problems, Solution
from vllm_gac.planning.request import PlanRequest
from vllm_gac.version import version

logger = logging.getLogger(__name__)

# Where times are predicted, and neither time nor loss has a budget, the plan is the fastest that is
# expected to lose so many times the least; expected losses are off by far more. By the H200's
# profile, one of Llama-3-8B's shape with half the cache decodes 128 sequences of 2,300 tokens in
# 8.1 ms for 11.6, one of a trained 1.5B 256 of 2,048 in 4.8 for 5.2.
_NEAR = 1.02
# Where the notes say how far a plan may be from the best one: of loss, in nats per token.
_GAPS = {"loss": "gap", "time": "gap_nanoseconds", "bytes": "gap_bytes"}
# A warning is given if rounding keys is expected to lose more than this, in nats per token.
_MUCH = 0.05


def plan(
    model: str | Path,
    request: PlanRequest | None = None,
    stats: str | Path | None = None,
    *,
    revision: str | None = None,
) -> Plan:
    """Choose the dims of every layer of a dense model. Nothing is compressed yet.

    Args:
        model: Directory of a dense model, or its id on the Hub.
        request: The budgets, and the methods and dims that the plan may use. By default everything
            is kept.
        stats: A statistics file that `calibrate` wrote. Without it, the plan uses the losses of
            other models, which are the same in every layer.
        revision: A branch, tag or commit of a model on the Hub. None: main.

    Returns:
        The plan, for `compress`. `plan.model_dump_json()` is what a plan file holds.

    Raises:
        CheckpointError: If the model or the statistics cannot be used.
        PlanError: If no plan is within the budgets, or the request needs statistics that are
            missing.
        ProfileError: If there is no profile of the request's GPU.

    Examples:
        >>> import vllm_gac
        >>> request = vllm_gac.PlanRequest(param_ratio=0.9, kv_ratio=0.75)
        >>> plan = vllm_gac.plan("llama", request)
        >>> plan.parameters.used <= plan.parameters.allowed, len(plan.layers)
        (True, 2)
    """
    checkpoint = open_dense(model_directory(model, revision))
    request = request or PlanRequest()
    if stats is None:
        return prior_plan(checkpoint, request)
    return measured_plan(open_statistics(Path(stats), checkpoint), request)


def measured_plan(
    stats: Statistics, request: PlanRequest, problems: Problems | None = None
) -> Plan:
    """Make the best plan by the losses that calibration measured on the model.

    Args:
        stats: The statistics of the dense model.
        request: What the plan is to keep.
        problems: What is known of the model from plans for other losses.

    Raises:
        CheckpointError: If the statistics are malformed.
        PlanError: If the statistics lack what the request needs, or no plan fits.
    """
    model, measured = stats.model, stats.measured
    stats.check_methods(request.methods)
    if measured.value_group == 1:  # the statistics hold nothing about merged heads
        if max(request.value_group or 1, request.key_group or 1) > 1:
            raise PlanError(
                f"{stats.path}: no heads of this model can be merged by what was measured; leave "
                "out --value-group and --key-group"
            )
        request = replace(request, value_group=1, key_group=1)
    losses = read_losses(stats)
    known = (
        "tokens", "tokens_sha256", "sequence_length", "probe_tokens", "held_sha256", "metric_tokens"
    )  # fmt: skip
    calibration = {key: measured.metadata[key] for key in known if key in measured.metadata}
    notes = {"calibration": calibration}
    fp8 = request.types.cache == "fp8"
    served = with_fp8_cache(losses) if fp8 else losses
    best = best_plan(model, served, request, notes, problems=problems)
    layers = planned_layout(model, best).layers
    if fp8:  # what is expected is what evaluation measures, without a quantized cache
        lost = loss_of(model.layout, layers, losses)
        rounding = round(loss_of(model.layout, layers, served) - lost, 6)
        if rounding > _MUCH:
            logger.warning(
                "rounding keys to FP8 is expected to lose %.2f nats per token more: let --method "
                "have heads, which caches such keys as latents, or keep a cache of 16 bits",
                rounding,
            )
        with_rounding = best.notes | {"fp8_keys_loss": rounding}
        best = best.model_copy(update={"expected_loss": round(lost, 6), "notes": with_rounding})
    each = loss_by_sequence(stats, layers, losses)
    if (ends := interval(each)) is None:
        return best
    about = {"expected_interval": [round(end, 6) for end in ends]}
    return best.model_copy(update={"notes": best.notes | about})


def prior_plan(model: Checkpoint, request: PlanRequest) -> Plan:
    """Make the best plan by the losses of other models, without statistics of this one.

    Args:
        model: The dense model.
        request: What the plan is to keep.

    Raises:
        PlanError: If no plan fits.
    """
    losses = prior_losses(model.layout, request.methods)
    best = best_plan(model, losses, request, {"losses": "prior"})
    # The field expected_loss is only for losses that were measured on this model.
    notes = best.notes | {"expected_loss": best.expected_loss}
    return best.model_copy(update={"expected_loss": None, "notes": notes})


def best_plan(
    model: Checkpoint,
    losses: Losses,
    request: PlanRequest,
    notes: Mapping[str, Any] | None = None,
    problems: Problems | None = None,
) -> Plan:
    """Make the plan with the least loss within the budgets, or least time or bytes within a loss.

    Args:
        model: The dense model.
        losses: The expected loss of every dim of every layer.
        request: What the plan is to keep.
        notes: More entries for the plan's notes.
        problems: What is known of the model from plans for other losses.

    Raises:
        PlanError: If no plan fits. The message gives the smallest feasible value of the option.
    """
    problems = problems or Problems(model)
    problem, solution, about = _no_slower_solution(request, model, losses, problems)
    layout = replace(model.layout, layers=tuple(solution.layers))
    time, about_time = _time_budget(request, problem, solution.layers, model.layout)
    return Plan(
        version=1,
        tool_version=version(),
        model_config_sha256=model.config_sha256,
        model_weights_sha256=model.weights_sha256,
        methods=[m for m in METHODS if m in request.methods],
        align=request.align,
        param_ratio=request.param_ratio,
        kv_ratio=request.kv_ratio,
        parameters=problem.parameters.model_copy(update={"used": layout.parameters}),
        kv_elements=problem.kv_elements.model_copy(update={"used": layout.kv_elements}),
        nanoseconds=time,
        expected_loss=round(solution.loss, 6),
        layers=[LayerSection.model_validate(layer.section()) for layer in solution.layers],
        notes={
            "planner": "knapsack",
            _GAPS[request.minimize if request.max_loss else "loss"]: solution.gap,
            "types": asdict(request.types),
        }
        | about_time
        | _about_loss(request, problem, solution.layers, model.layout)
        | ({"times": about} if about else {})
        | dict(notes or {}),
    )


def _about_loss(
    request: PlanRequest, problem: Problem, layers: Sequence[LayerLayout], dense: ModelLayout
) -> dict[str, Any]:
    """What the notes say of a request with a loss, and of bytes if these are the objective."""
    if request.max_loss is None:
        return {}
    about: dict[str, Any] = {"max_loss": request.max_loss, "request": request.changed()}
    if request.minimize == "bytes":
        dense_bytes, used = (problem.minimized(of) for of in (dense.layers, layers))
        about["bytes"] = {"dense": dense_bytes, "used": used}
    return about


def _no_slower_solution(
    request: PlanRequest, model: Checkpoint, losses: Losses, problems: Problems
) -> tuple[Problem, Solution, list[str]]:
    """The best choice that is predicted to be no slower than the dense model, if there is one.

    A request with a limit of time may get a slower one. Otherwise the fastest of those that lose
    about as little counts as best, and the dense model's time is the limit if it exceeds that.

    Returns:
        The problem, its solution, and what is to be known about predicted times.
    """
    problem, solution = _best_solution(request, model, losses, problems)
    if problem.deployment is None:
        return problem, solution, []
    about = request.about_times(problem.deployment.profile)
    dense = problem.deployment.dense_microseconds(model.layout)
    is_free = not request.weighs_time and request.max_loss is None
    share = math.expm1(_NEAR * solution.loss)
    if is_free and 0 < share < 1:  # what loses more is of no use, however fast
        near = replace(request, max_loss=share)
        with suppress(PlanError):  # there losses are rounded up
            _, faster = _best_solution(near, model, losses, problems)
            # In nats again: how much less than the faster one any may lose.
            solution = replace(faster, gap=max(0.0, faster.loss - solution.loss + solution.gap))
    time = problem.deployment.nanoseconds(model.layout, solution.layers) / 1000
    if time <= dense:
        return problem, solution, about
    slower = f"{time:,.0f} us a step, {time / dense:.2f} times the dense model's {dense:,.0f}"
    if is_free:
        with suppress(PlanError):
            as_dense = replace(request, latency_ratio=1.0)
            limited, faster = _best_solution(as_dense, model, losses, problems)
            said = (
                "the dense model's time was taken as a limit: without one, a plan would lose "
                f"{solution.loss:.4f} nats per token instead of {faster.loss:.4f}, and take "
                f"{slower}"
            )
            return limited, faster, [said, *about]
        slower += "; no plan within these budgets was found that is not slower"
    return problem, solution, [f"slower than the dense model: {slower}", *about]


def _best_solution(
    request: PlanRequest, model: Checkpoint, losses: Losses, problems: Problems
) -> tuple[Problem, Solution]:
    """The best choice by the request's methods, or by some of them if it is better."""
    solutions: list[tuple[Problem, Solution]] = []
    faults: list[PlanError] = []
    for one in _with_fewer_methods(request, problems):
        try:
            problem = problems.of(one)
            solutions.append((problem, problem.solve(losses)))
        except PlanError as e:  # of these methods none may fit the budgets, but fewer may
            faults.append(e)
    if not solutions:
        check_feasible(request, problems)
        raise faults[0]
    if request.max_loss is None:
        return min(solutions, key=lambda one: one[1].loss)

    return min(solutions, key=lambda one: (one[0].minimized(one[1].layers), one[1].loss))


def check_feasible(request: PlanRequest, problems: Problems) -> None:
    """Raise PlanError, before anything is measured, if no plan is within the budgets.

    The message names the option and the smallest value that is feasible.
    """
    every = [problems.of(one) for one in _with_fewer_methods(request, problems)]
    min(every, key=Problem.excess).check_feasible()


def _with_fewer_methods(request: PlanRequest, problems: Problems) -> list[PlanRequest]:
    """The request, and if a method refines the candidates of others, it without some of these.

    Of the refining method there are few candidates, or their combinations would be too many. With
    fewer methods there are more.
    """
    changed = problems.of(request).changed_fields
    methods = {name: method for name in request.methods for method in methods_of([name])}
    if not any(method.refines for method in methods.values()):
        return [request]
    always = [n for n, m in methods.items() if m.refines or changed.intersection(m.fields)]
    others = [name for name in methods if name not in always]
    subsets = chain.from_iterable(combinations(others, n) for n in range(len(others)))
    return [request, *(replace(request, methods=(*kept, *always)) for kept in subsets)]


def _time_budget(
    request: PlanRequest, problem: Problem, layers: list[LayerLayout], dense: ModelLayout
) -> tuple[PlanBudget | None, dict[str, Any]]:
    """The budget of time, and notes: for what times are predicted, and where the limit is from."""
    if problem.deployment is None:
        return None, {}
    before = 1000 * problem.deployment.dense_microseconds(dense)
    used = problem.deployment.nanoseconds(dense, layers)
    if request.limits_time and problem.microseconds is not None:
        limit, allowed = "request", math.floor(1000 * problem.microseconds)
    elif request.max_loss is None and used <= before:
        limit, allowed = "dense model", round(before)
    else:
        limit, allowed = "none", math.ceil(used)
    used = math.ceil(used)
    budget = PlanBudget(dense=round(before), allowed=max(used, allowed), used=used)
    # What the same kernels gain without compression, and what of it one flag gives.
    ours, one_flag = (
        round(problem.deployment.nanoseconds(dense, dense.layers, served))
        for served in (COMPRESSED, DENSE_WITH_GAC)
    )
    about = {"deployment": str(problem.deployment), "time_limit": limit}
    uncompressed = {"our_kernels": ours, "attention_backend_gac": one_flag}
    return budget, about | {"dense_nanoseconds": uncompressed}

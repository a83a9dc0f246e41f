"""A plan request as one exact multi-choice knapsack: one candidate for each part of each layer."""

import math
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace

import numpy as np

from vllm_gac.checkpoint.open import Checkpoint
from vllm_gac.compression.methods.base import Curve
from vllm_gac.compression.methods.registry import methods_fault
from vllm_gac.errors import PlanError
from vllm_gac.layout.dims import LayerLayout
from vllm_gac.layout.tensor_parallel import check_planned_for
from vllm_gac.planning.knapsack import Choice, Ints, choose
from vllm_gac.planning.knapsack_items import part_candidates, part_parameters
from vllm_gac.planning.losses import Losses, loss_of
from vllm_gac.planning.plan_file import exact_budget
from vllm_gac.planning.request import BUDGET_FLAGS, PlanRequest

# Because of fused GEMMs, the time of a layer differs a little from that of its parts. If a plan
# takes too long, the time budget is lowered and the plan is made again, at most this often.
_ATTEMPTS = 8
# Where losses are a budget, they are counted in units of this many nats per token. A candidate that
# loses more than the most is as good as none.
_NATS, _MAX_NATS = 1e-9, 100.0


@dataclass(frozen=True, slots=True)
class Solution:
    """The best layers.

    Attributes:
        layers: The layers of the model.
        loss: Their expected loss, in nats per token.
        gap: No other choice is better by more than this, in nats per token, or in nanoseconds or
            bytes if these were to be the least.
    """

    layers: list[LayerLayout]
    loss: float
    gap: float


class Problem:
    """A request for one model: exact budgets, candidates with their costs, and limits.

    Attributes:
        deployment: The deployment whose time is predicted, or None.
        microseconds: The budget of time, in microseconds, or None.
        parameters: The budget of parameters.
        kv_elements: The budget of elements in the KV cache per token.
    """

    def __init__(self, request: PlanRequest, model: Checkpoint) -> None:
        """Find the candidates.

        Args:
            request: What the plan is to keep.
            model: The dense model.

        Raises:
            PlanError: If the model is compressed already, if its heads cannot be split over the
                GPUs, or if the request leaves no candidate for some part.
            ProfileError: If there is no profile of the request's GPU.
        """
        if model.config.gac is not None:
            raise PlanError(f"{model.directory}: is compressed already; plan for the dense model")
        if fault := methods_fault(model.kept, request.methods):
            raise PlanError(f"{model.directory}: {fault}")
        self._request, self._dense = request, model.layout
        check_planned_for(model.layout, request.tensor_parallel_size)
        request.check_groups(model.layout)
        self.deployment = request.deployment()
        if model.kept is not None and self.deployment is not None:
            what = "experts" if model.layout.experts else "models that are quantized in part"
            raise PlanError(
                f"{model.directory}: profiles have no times of {what}, so none are predicted for "
                "this model; leave out --gpu, --max-loss, time limits and batches"
            )
        self.microseconds = request.latency
        if request.latency_ratio is not None and self.deployment is not None:
            dense_time = self.deployment.dense_microseconds(model.layout)
            self.microseconds = request.latency_ratio * dense_time
        self.parameters = exact_budget(request.param_ratio, model.layout.parameters)
        self.kv_elements = exact_budget(request.kv_ratio, model.layout.kv_elements)
        self._parts = part_candidates(model.layout, request, self.deployment)
        self._limits = self._limits_for_items()

    def to_lose(self, max_loss: float | None) -> "Problem":
        """This problem with another `max_loss` in its request. The candidates are the same."""
        other = copy(self)
        other._request = replace(self._request, max_loss=max_loss)
        return other

    @property
    def changed_fields(self) -> set[str]:
        """The fields of a layer that the request has no plan leave as they are."""
        dense = self._dense.layers[0]
        return {name for part in self._parts if dense not in part.layers for name in part.fields}

    def excess(self) -> float:
        """By what share of the dense model the smallest plan exceeds a budget; at least 0."""
        dense: list[float] = [self.parameters.dense, self.kv_elements.dense]
        if self.deployment is not None:
            dense.append(1000 * self.deployment.dense_microseconds(self._dense))
        unspent = self._unspent(self._limits)
        return float(max(0.0, *(-unspent / dense[: len(unspent)])))

    def check_feasible(self) -> None:
        """Check the budgets before anything is measured.

        Raises:
            PlanError: If no plan is within the budgets. The message names the option and the
                smallest value that is feasible.
        """
        unspent = self._unspent(self._limits)
        methods = ",".join(self._request.methods)
        for column, flag, ratio, budget in (
            (1, "--kv-ratio", self._request.kv_ratio, self.kv_elements),
            (0, "--param-ratio", self._request.param_ratio, self.parameters),
        ):
            if (short := -int(unspent[column])) > 0:
                needed = budget.allowed + short
                raise PlanError(
                    f"{flag} {ratio}: not feasible with --method {methods}; at least "
                    f"{math.ceil(10_000 * needed / budget.dense) / 10_000} is needed"
                    + self._explain_binding_budget(column, needed, budget.dense)
                )
        self._check_time(unspent)

    def solve(self, losses: Losses) -> Solution:
        """Find the choice with the least loss within every budget.

        If a loss was asked for, it is the one with the least time or bytes within that loss. The
        time budget is checked on whole layers.

        Args:
            losses: The expected loss of every dim of every layer.

        Raises:
            PlanError: If no plan is within the budgets, or none loses so little.
        """
        # Of each part of each layer, the losses [candidates].
        curves = [part.losses(of_layer) for part in self._parts for of_layer in losses]
        limits = dict(self._limits)
        kept = self._loss_of_kept(losses)
        self.check_feasible()
        if self._request.max_loss is not None:
            solution = self._within_loss(curves, math.log1p(self._request.max_loss), kept)
        else:
            solution = self._with_least_loss(curves, limits)
        return replace(solution, loss=kept + solution.loss)

    def _loss_of_kept(self, losses: Losses) -> float:
        """What is lost of parts that have no candidates: by rounding the keys, which are whole."""
        chosen = {name for part in self._parts for name in part.curve_dims}
        kept = [{n: curve for n, curve in of.items() if n not in chosen} for of in losses]
        return loss_of(self._dense, self._dense.layers, kept)

    def _with_least_loss(self, curves: Sequence[Curve], limits: dict[str, int]) -> Solution:
        for _ in range(_ATTEMPTS):
            solution = self._choose(curves, limits)
            if self.microseconds is None or self.deployment is None:
                return solution
            time = self.deployment.nanoseconds(self._dense, solution.layers)
            if (over := time - 1000 * self.microseconds) <= 0:
                return solution
            limits["nanoseconds"] -= math.ceil(over)
            self._check_time(self._unspent(limits))
        raise PlanError(
            f"--latency {self.microseconds:.0f}: a plan of its parts fits, none of whole layers "
            f"was found in {_ATTEMPTS} attempts; allow more"
        )

    def _limits_for_items(self) -> dict[str, int]:
        """The budgets minus the costs of everything that is not compressed."""
        dense = self._dense
        count, layer = len(dense.layers), dense.layers[0]
        ours = sum(part_parameters(dense, layer, part.prefix) for part in self._parts)
        caches = any(part.prefix == "self_attn." for part in self._parts)
        limits = {
            "parameters": self.parameters.allowed - (dense.parameters - count * ours),
            "kv_elements": self.kv_elements.allowed - (0 if caches else dense.kv_elements),
        }
        if self.microseconds is not None and self.deployment is not None:
            dense_nanoseconds = self.deployment.nanoseconds(dense, dense.layers)
            limits["nanoseconds"] = math.floor(1000 * self.microseconds - dense_nanoseconds)
        return limits

    def _unspent(self, limits: Mapping[str, int]) -> Ints:
        """[budgets]: the rest of each limit after the smallest candidates of all parts.

        The limit of time is relative to the dense model.
        """
        smallest = sum(part.costs.min(0) for part in self._parts)
        count = len(self._dense.layers)
        left: Ints = np.array(list(limits.values())) - count * smallest[: len(limits)]
        return left

    def _check_time(self, unspent: Ints) -> None:
        """Raise PlanError if no plan is as fast as the request demands."""
        if self.microseconds is not None and unspent[2] < 0:
            raise PlanError(
                f"--latency {self.microseconds:.1f}: not feasible with --method "
                f"{','.join(self._request.methods)}; at least "
                f"{math.ceil(self.microseconds - int(unspent[2]) / 1000)} microseconds are needed"
            )

    def _explain_binding_budget(self, column: int, needed: int, dense_size: int) -> str:
        """The sizes of the smallest candidates of each part, as shares of the dense model."""
        count = len(self._dense.layers)
        parts = {part.name: count * int(part.costs[:, column].min()) for part in self._parts}
        parts["what is not compressed"] = needed - sum(parts.values())
        shares = (f"{name} {size / dense_size:.3f}" for name, size in parts.items() if size)
        return f" ({', '.join(shares)})"

    def minimized(self, layers: Sequence[LayerLayout]) -> float:
        """What a request by a loss minimizes: the nanoseconds of these layers, or their bytes."""
        assert self.deployment is not None  # such a request has one
        if self._request.minimize == "time":
            return self.deployment.nanoseconds(self._dense, layers)
        return self._request.held_bytes(self.deployment.mix, self._dense, layers)

    def _within_loss(self, curves: Sequence[Curve], max_loss: float, kept: float) -> Solution:
        """The choice with the least time or bytes that loses at most `max_loss` nats per token.

        It is the same knapsack: the loss is a budget, and what is saved is the value. Of it, what
        has no candidates takes `kept`.
        """
        parts = [part for part in self._parts for _ in self._dense.layers]
        losses = [np.ceil(np.minimum(lost, _MAX_NATS) / _NATS).astype(np.int64) for lost in curves]
        costs = [
            np.column_stack((part.costs[:, :2], lost))
            for part, lost in zip(parts, losses, strict=True)
        ]
        values = [-part.costs[:, 2].astype(np.float64) for part in parts]
        try:
            chosen = choose(costs, values, self._limits | {"loss": int((max_loss - kept) / _NATS)})
        except PlanError as e:
            min_loss = kept + self._choose(curves, self._limits).loss
            if min_loss <= max_loss:
                raise
            hint = (
                ""
                if kept <= max_loss
                else (
                    ", or add heads to --method: the keys, which stay as they are, are expected to "
                    f"lose {math.expm1(kept):.2%} in an FP8 cache"
                )
            )
            raise PlanError(
                f"--max-loss {self._request.max_loss:.2%}: what else is asked for is expected to "
                f"lose {math.expm1(min_loss):.2%} at least; allow more{hint}"
            ) from e
        return self._solution(curves, chosen)

    def _choose(self, curves: Sequence[Curve], limits: Mapping[str, int]) -> Solution:
        costs = [part.costs[:, : len(limits)] for part in self._parts for _ in self._dense.layers]
        values = [-lost for lost in curves]
        try:
            choice = choose(costs, values, limits)
        except PlanError as e:
            raise PlanError(
                f"{', '.join(BUDGET_FLAGS[name] for name in limits)}: feasible one by one, but not "
                f"together with --method {','.join(self._request.methods)}; allow more"
            ) from e
        return self._solution(curves, choice)

    def _solution(self, curves: Sequence[Curve], choice: Choice) -> Solution:
        count, layers = len(self._dense.layers), list(self._dense.layers)
        for number, position in enumerate(choice.positions):
            part, index = self._parts[number // count], number % count
            layers[index] = part.put(layers[index], part.layers[position])
        loss = math.fsum(lost[p] for lost, p in zip(curves, choice.positions, strict=True))
        return Solution(layers, loss, choice.gap)


class Problems:
    """The problems of one model. Requests that differ in `max_loss` alone share the candidates.

    To predict the times of all candidates takes most of what a plan takes.

    Args:
        model: The dense model.
    """

    def __init__(self, model: Checkpoint) -> None:
        self._model = model
        self._made: dict[str, Problem] = {}

    def of(self, request: PlanRequest) -> Problem:
        """The problem of a request; raises what `Problem` does."""
        # Whether there is a loss decides what candidates there are; how much it is does not.
        key = str(replace(request, max_loss=request.max_loss and 0.5))
        if key not in self._made:
            self._made[key] = Problem(request, self._model)
        return self._made[key].to_lose(request.max_loss)

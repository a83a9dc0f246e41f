"""The candidates for each part of a layer: its attention, its MLP, or a single linear.

The methods make them (compression/methods). All layers of a dense model have the same dims. So
costs are counted once, and only the losses differ from layer to layer.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np

from vllm_gac.compression.methods.base import Candidates, Choices, Curve, Prefix
from vllm_gac.compression.methods.registry import METHODS, methods_of
from vllm_gac.gpu.decode_fit import fits_decode_kernel
from vllm_gac.gpu.latency.layer import (
    BatchMix,
    Deployment,
    attention_microseconds,
    mlp_microseconds,
    timed_together,
)
from vllm_gac.gpu.profile_files import read_profile
from vllm_gac.layout.dims import LINEARS, LayerLayout, ModelLayout
from vllm_gac.planning.knapsack import Ints
from vllm_gac.planning.request import PlanRequest

# Of a layer in which only the attention (True) or only the MLP (False) differs from the dense one:
# nanoseconds of that half, or bytes of the whole.
Weigh: TypeAlias = Callable[[bool, LayerLayout], float]


@dataclass(frozen=True, slots=True)
class PartCandidates(Candidates):
    """The candidates for one part of a layer, and what they cost. They are the same in every layer.

    Attributes:
        costs: [candidates, budgets] the parameters of the part, its elements in the KV cache per
            token and, if the request weighs time or bytes, those of the layer minus those of the
            dense layer, in nanoseconds or bytes (mostly below 0).
        curve_dims: The dim [candidates] of each curve of losses (planning/losses.py), by its name;
            -1 where a candidate has none.
    """

    costs: Ints = field(kw_only=True)
    curve_dims: Mapping[str, Ints] = field(kw_only=True)

    def losses(self, curves: Mapping[str, Curve]) -> Curve:
        """The loss of every candidate [candidates] by a layer's curves, in nats per token."""
        losses: Curve = np.zeros(len(self.layers))
        for name, dims in self.curve_dims.items():
            losses += np.where(dims < 0, 0.0, curves[name][dims])
        return losses

    @property
    def name(self) -> str:
        """The part as an error names it."""
        return (self.prefix if isinstance(self.prefix, str) else ", ".join(self.prefix)).strip(".")

    def put(self, layer: LayerLayout, chosen: LayerLayout) -> LayerLayout:
        """`layer` with this part of the candidate `chosen`."""
        fields: dict[str, Any] = {name: getattr(chosen, name) for name in self.fields}
        return replace(layer, **fields, ranks=MappingProxyType({**layer.ranks, **chosen.ranks}))


def part_candidates(
    dense: ModelLayout, request: PlanRequest, deployment: Deployment | None
) -> list[PartCandidates]:
    """Make the candidates for the parts of a layer that the request's methods change.

    Args:
        dense: The dense model.
        request: What the plan is to keep.
        deployment: The deployment whose time is predicted, if the request has one.

    Returns:
        One entry for each part.

    Raises:
        PlanError: A method has no candidates.
    """
    choices = choices_of(dense, request, deployment)
    parts: list[Candidates] = []
    for method in methods_of(request.methods):
        parts = method.candidates(parts, choices)
    weigh = _weigher(dense, request, deployment)
    return [
        PartCandidates(
            part.prefix,
            part.layers,
            part.fields,
            costs=_costs(dense, part.prefix, part.layers, weigh),
            curve_dims=_curve_dims(dense, part),
        )
        for part in parts
    ]


def _curve_dims(dense: ModelLayout, part: Candidates) -> dict[str, Ints]:
    """The dims of each curve, of the methods that change a field of the part or ranks."""
    fields = {*part.fields, "ranks"}
    methods = [method for method in methods_of(METHODS) if fields & {*method.fields}]
    dims_by_curve: dict[str, Ints] = {}
    for number, layer in enumerate(part.layers):
        for method in methods:
            for name, dim in method.curve_dims(dense, layer):
                dims_by_curve.setdefault(name, np.full(len(part.layers), -1))[number] = dim
    return dims_by_curve


def choices_of(dense: ModelLayout, request: PlanRequest, deployment: Deployment | None) -> Choices:
    """What methods choose from. The default GPU serves where no deployment is given."""
    serving = deployment or Deployment(read_profile(), BatchMix(), request.types)

    def served(layers: Iterable[LayerLayout]) -> list[LayerLayout]:
        first = dense.layers[0]  # whose attention vLLM's own serves
        gpu, sizes = serving.profile.capability, (1 if serving.types.cache == "fp8" else 2,)
        return [x for x in layers if x == first or fits_decode_kernel(dense, x, gpu, sizes)]

    def fastest(prefix: str, layers: Sequence[LayerLayout]) -> list[LayerLayout]:
        if deployment is None or request.minimize != "time":
            return list(layers)
        time = attention_microseconds if prefix.startswith("self_attn.") else mlp_microseconds
        kept: list[LayerLayout] = []
        shortest = math.inf
        for layer in reversed(layers):
            if (needed := time(dense, layer, deployment)) < shortest:
                kept.insert(0, layer)
                shortest = needed
        return kept

    return Choices(
        dense=dense,
        key_form=request.key_form,
        key_group=request.key_group,
        value_group=request.value_group,
        tensor_parallel_size=request.tensor_parallel_size,
        together=timed_together(serving) if request.weighs_time else [(n,) for n in LINEARS],
        up_to=request.up_to,
        served=served,
        fastest=fastest,
    )


def _costs(
    dense: ModelLayout, prefix: Prefix, layers: Sequence[LayerLayout], weigh: Weigh | None
) -> Ints:
    """The costs [layers, budgets], as in `PartCandidates`."""
    columns = [[part_parameters(dense, layer, prefix) for layer in layers]]
    attends = prefix == "self_attn."
    columns.append([layer.kv_elements if attends else 0 for layer in layers])
    if weigh is not None:
        of_attention = (prefix if isinstance(prefix, str) else prefix[0]).startswith("self_attn.")
        dense_weight = weigh(of_attention, dense.layers[0])
        columns.append([round(weigh(of_attention, layer) - dense_weight) for layer in layers])
    return np.array(columns, dtype=np.int64).T


def _weigher(
    dense: ModelLayout, request: PlanRequest, deployment: Deployment | None
) -> Weigh | None:
    """What the request weighs beside its ratios, if anything."""
    if deployment is None:
        return None
    if request.minimize == "bytes":
        return lambda _, layer: request.held_bytes(deployment.mix, dense, [layer])
    if not request.weighs_time:
        return None

    def nanoseconds(of_attention: bool, layer: LayerLayout) -> float:
        time = attention_microseconds if of_attention else mlp_microseconds
        return 1000 * time(dense, layer, deployment)

    return nanoseconds


def part_parameters(dense: ModelLayout, layer: LayerLayout, prefix: Prefix) -> int:
    """The number of parameters in the linear layers of `layer` whose names begin with `prefix`."""
    model = replace(dense, layers=(layer,))
    return sum(
        math.prod(shape)
        for name, shape in model.layer_tensors(0)
        if name.removeprefix("model.layers.0.").startswith(prefix)
        and not name.endswith(".rope_inv_freq")
    )

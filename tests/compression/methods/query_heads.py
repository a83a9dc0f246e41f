"""A method that the package does not have: fewer query heads, as many for every KV head."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from vllm_gac.compression.methods.base import (
    Candidates,
    Choices,
    Compressor,
    Curve,
    MeasuredLayer,
    Method,
    Probe,
)
from vllm_gac.compression.methods.heads.projections import with_bias, without_bias
from vllm_gac.compression.methods.prior import WIDTHS, prior_curve
from vllm_gac.compression.methods.statistics import input_covariance, selected, tail_sums
from vllm_gac.errors import PlanError
from vllm_gac.layout.dims import LayerLayout, ModelLayout


class QueryHeads(Method):
    """Fewer query heads."""

    fields = ("query_heads",)
    components = ("queries",)
    keeps_mlp = True

    def measured(self, dense: ModelLayout, value_group: int) -> Iterator[Compressor]:
        yield Queries()

    def making(self, dense: ModelLayout, target: LayerLayout) -> Iterator[Compressor]:
        if target.query_heads != dense.layers[0].query_heads:
            yield Queries()

    def curve_dims(self, dense: ModelLayout, layer: LayerLayout) -> Iterator[tuple[str, int]]:
        yield "queries", layer.query_heads

    def probes(self, dense: ModelLayout) -> Iterator[Probe]:
        fewer = dense.num_attention_heads - dense.num_key_value_heads
        yield Probe("queries", replace(dense.layers[0], query_heads=fewer))

    def prior(self, dense: ModelLayout) -> dict[str, Curve]:
        return {"queries": prior_curve(WIDTHS, dense.num_attention_heads)}

    def candidates(self, parts: Sequence[Candidates], choices: Choices) -> list[Candidates]:
        full, step = choices.dense.num_attention_heads, choices.dense.num_key_value_heads
        whole = Candidates("self_attn.", choices.dense.layers[:1])
        part = next((part for part in parts if part.prefix == "self_attn."), whole)
        layers = [
            replace(layer, query_heads=heads)
            for layer in part.layers
            for heads in range(step, full + 1, step)
        ]
        candidates = Candidates("self_attn.", layers, part.fields + self.fields)
        return [*(other for other in parts if other is not part), candidates]

    def check(self, dense: ModelLayout, layer: LayerLayout, where: str) -> None:
        if layer.query_heads > dense.num_attention_heads:
            raise PlanError(f"{where}.query_heads: {layer.query_heads} exceeds the dense ones")


class Queries:
    """Removes the query heads that o_proj gets least from."""

    name = "queries"
    inputs, metrics = ("self_attn.o_proj",), ()

    def full(self, dense: ModelLayout) -> int:
        return dense.num_attention_heads

    def errors(self, layer: MeasuredLayer) -> torch.Tensor:
        """The energy of the removed heads, without what they have in common."""
        energies = _energies(layer).sort(1, descending=True).values.sum(0)
        left = tail_sums(energies)
        # As many heads are kept as for the number below that every KV head has its share of.
        return left.repeat_interleave(layer.layout.num_key_value_heads)[
            : self.full(layer.layout) + 1
        ]

    def compress(self, layer: MeasuredLayer, target: LayerLayout) -> MeasuredLayer:
        energies = _energies(layer)
        kept = energies.topk(target.query_heads // len(energies), dim=1).indices.sort(1).values
        first = torch.arange(len(energies), device=kept.device)[:, None] * energies.shape[1]
        heads = (kept + first).flatten()
        weights, covariances = dict(layer.weights), dict(layer.covariances)
        query = with_bias(weights, "self_attn.q_proj").double()
        output = weights["self_attn.o_proj.weight"].double()
        rows = _of_heads(heads, len(query) // energies.numel())
        columns = _of_heads(heads, output.shape[1] // energies.numel())
        weights |= without_bias(weights, "self_attn.q_proj", query[rows])
        weights["self_attn.o_proj.weight"] = output[:, columns]
        covariances |= selected(covariances, "self_attn.q_proj", rows)
        covariance = input_covariance(layer, "self_attn.o_proj")
        covariances["self_attn.o_proj"] = covariance[columns][:, columns]
        return replace(layer, weights=weights, covariances=covariances)


def _of_heads(heads: torch.Tensor, size: int) -> torch.Tensor:
    return (heads[:, None] * size + torch.arange(size, device=heads.device)).flatten()


def _energies(layer: MeasuredLayer) -> torch.Tensor:
    """E|O x|^2 of each query head [KV heads, query heads of each]."""
    dense, output = layer.layout, layer.weights["self_attn.o_proj.weight"].double()
    each = ((output @ input_covariance(layer, "self_attn.o_proj")) * output).sum(0)
    return each.view(dense.num_attention_heads, -1).sum(1).view(dense.num_key_value_heads, -1)

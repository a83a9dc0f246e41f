"""The metrics of outputs are those of gradients."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from tests.support.exact_models import MODELS, exact_model, random_tokens
from vllm_gac.compression.backward import head_gradients
from vllm_gac.compression.methods.statistics import metric_of, of_input
from vllm_gac.compression.moments import shrunk
from vllm_gac.compression.output_metrics import measure_output_metrics
from vllm_gac.compression.reference_model import Reference, embed, layer_forward, layer_weights
from vllm_gac.layout.dims import LINEARS


def measured_metrics(
    model: Reference, tensors: Mapping[str, torch.Tensor], tokens: torch.Tensor
) -> dict[int, Mapping[str, torch.Tensor]]:
    metrics: dict[int, Mapping[str, torch.Tensor]] = {}

    def keep(index: int, measured: Mapping[str, torch.Tensor], by_input: torch.Tensor) -> None:
        metrics[index] = measured

    measure_output_metrics(model, tensors.__getitem__, tokens, LINEARS, keep)
    return metrics


@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS)
def test_metrics_are_those_of_autograd_on_the_whole_model(changes: dict[str, Any]) -> None:
    model, tensors = exact_model(**changes)
    read, tokens = tensors.__getitem__, random_tokens(5, 40)
    metrics = measured_metrics(model, tensors, tokens)
    outputs: list[dict[str, torch.Tensor]] = [{}, {}]
    hidden = embed(model, read, tokens).requires_grad_()
    for layer, seen in enumerate(outputs):
        dense = layer_weights(model, read, layer)
        hidden = layer_forward(
            model, model.layout.layers[layer], dense, hidden, observe_output=seen.__setitem__
        )
    incoming = head_gradients(model, read, hidden.detach(), draws=1)[0]
    assert sorted(metrics) == [0, 1]
    for layer, seen in enumerate(outputs):
        wanted = [seen[name] for name in LINEARS]
        gradients = torch.autograd.grad(hidden, wanted, incoming, retain_graph=True)
        for linear, gradient in zip(LINEARS, gradients, strict=True):
            rows = gradient[:, :-1].flatten(0, 1)
            weight = tensors[f"model.layers.{layer}.{linear}.weight"]
            moment = rows.T @ rows / len(rows)
            if of_input(linear):
                expected = shrunk(weight.T @ moment @ weight, len(rows), weight.T @ weight)
            else:
                expected = shrunk(moment, len(rows))
            torch.testing.assert_close(metrics[layer][metric_of(linear)], expected)

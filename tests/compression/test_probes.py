"""Probes: gradients, the quadratic form of the loss, and outputs at some of the tokens."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.dense_models import config
from tests.support.exact_models import MODELS, exact_model, random_tokens
from vllm_gac.compression.backward import entering_states, head_gradients
from vllm_gac.compression.measured import probes
from vllm_gac.compression.methods.base import MeasuredLayer
from vllm_gac.compression.methods.registry import compress_layer
from vllm_gac.compression.passes import observe_layer
from vllm_gac.compression.probes import (
    followed,
    measure_followed,
    measure_gradients,
    measure_layer,
    positions,
)
from vllm_gac.compression.reference_model import Reference, head, layer_forward, layer_weights
from vllm_gac.layout.dims import layout_of

METHODS = ("heads", "prune", "lowrank")


def gradients_of(
    model: Reference, tensors: dict[str, torch.Tensor], tokens: torch.Tensor, draws: int
) -> dict[int, torch.Tensor]:
    by_layer: dict[int, torch.Tensor] = {}

    def keep(index: int, measured: Mapping[str, torch.Tensor], by_input: torch.Tensor) -> None:
        by_layer[index] = measured["gradients"]

    measure_gradients(model, tensors.__getitem__, tokens, keep, draws=draws)
    return by_layer


def rest(model: Reference, tensors: dict[str, torch.Tensor], hidden: torch.Tensor) -> torch.Tensor:
    """What leaves the last layer if `hidden` leaves the first."""
    weights = layer_weights(model, tensors.__getitem__, 1)
    return layer_forward(model, model.layout.layers[1], weights, hidden)


@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS)
def test_gradients_are_those_of_finite_differences(changes: dict[str, Any]) -> None:
    model, tensors = exact_model(**changes)
    read, tokens = tensors.__getitem__, random_tokens(3, 40)
    at = positions(40)
    gradients = gradients_of(model, tensors, tokens, draws=2)
    _, left, last = entering_states(model, read, tokens)
    by_last = head_gradients(model, read, last, draws=2)
    torch.testing.assert_close(gradients[1], by_last[:, :, at])
    generator = torch.Generator().manual_seed(0)
    for token in (0, 17, 38):
        change = torch.zeros_like(left)
        change[:, token] = 1e-6 * torch.randn(3, 48, generator=generator, dtype=torch.float64)
        moved = rest(model, tensors, left + change) - rest(model, tensors, left - change)
        expected = (by_last * moved).sum((2, 3)) / 2
        got = (gradients[0][:, :, at.tolist().index(token)] * change[:, token]).sum(-1)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-12)


def test_half_the_square_is_how_far_the_predictions_diverge() -> None:
    model, tensors = exact_model()
    read, tokens = tensors.__getitem__, random_tokens(2, 24)
    gradients = gradients_of(model, tensors, tokens, draws=4000)[0]
    left = entering_states(model, read, tokens)[1]
    dense = head(model, read, rest(model, tensors, left)).log_softmax(-1)
    generator = torch.Generator().manual_seed(0)
    for token in (0, 11, 22):
        change = torch.zeros_like(left)
        change[:, token] = 0.02 * torch.randn(2, 48, generator=generator, dtype=torch.float64)
        moved = head(model, read, rest(model, tensors, left + change)).log_softmax(-1)
        direct = (dense.exp() * (dense - moved))[:, :-1].sum((1, 2))
        expected = (gradients[:, :, token] * change[:, token]).sum(-1).square().mean(0) / 2
        torch.testing.assert_close(expected, direct, rtol=0.15, atol=0)


@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS)
def test_the_outputs_of_some_tokens_are_those_of_the_whole_layer(changes: dict[str, Any]) -> None:
    model, tensors = exact_model(**changes)
    read, tokens = tensors.__getitem__, random_tokens(3, 200)
    at = positions(200)
    assert len(at) == 66
    weights, own = layer_weights(model, read, 1), model.layout.layers[1]
    hidden = entering_states(model, read, tokens)[1]
    stats, before = observe_layer(model, 1, weights, hidden)
    layer = MeasuredLayer(model.layout, weights, stats, model.inv_freq * own.has_rope)
    gradients = gradients_of(model, tensors, tokens, draws=2)[1]
    tried = probes(model.layout, METHODS)
    divergence = measure_layer(model, layer, tried, hidden, gradients)
    assert divergence.shape == (6, 3)
    for probe, lost in zip(tried, divergence, strict=True):
        smaller = {name: t.double() for name, t in compress_layer(layer, probe.layer).items()}
        target = replace(probe.layer, has_rope=own.has_rope)
        after = layer_forward(model, target, smaller, hidden)
        products = (gradients * (after - before)[:, at]).sum(-1)
        expected = products.square().mean((0, 2)) / 2
        torch.testing.assert_close(lost.double(), expected, rtol=1e-5, atol=1e-12)


@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS)
def test_a_probe_that_is_followed_loses_what_the_whole_model_does(changes: dict[str, Any]) -> None:
    model, tensors = exact_model(**changes)
    read, tokens = tensors.__getitem__, random_tokens(3, 200)
    entering, left, last = entering_states(model, read, tokens)
    weights = layer_weights(model, read, 0)
    layer = MeasuredLayer(
        model.layout, weights, observe_layer(model, 0, weights, entering)[0], model.inv_freq
    )
    dense = head(model, read, rest(model, tensors, left)).log_softmax(-1)
    compared = torch.arange(1, 199, 3)
    tried = probes(model.layout, METHODS)
    for number in followed(model.layout, tried, 0):
        assert tried[number].component in ("width", "rank.mlp")
        target = tried[number].layer
        lost = measure_followed(model, read, 0, layer, target, entering, last)
        smaller = {name: t.double() for name, t in compress_layer(layer, target).items()}
        moved = rest(model, tensors, layer_forward(model, target, smaller, entering))
        moved = head(model, read, moved).log_softmax(-1)
        direct = (dense.exp() * (dense - moved)).sum(-1)[:, compared].mean()
        assert lost == pytest.approx(float(direct), rel=1e-9)
        assert lost > 1e-6


@pytest.mark.parametrize(("layers", "count"), [(1, 1), (4, 1), (28, 7), (80, 8)])
def test_so_few_layers_are_followed_that_the_time_grows_with_all(layers: int, count: int) -> None:
    dense = layout_of(config(num_hidden_layers=layers))
    tried = probes(dense, ("heads", "prune"))
    each = [len(followed(dense, tried, index)) for index in range(layers)]
    assert each == [1] * count + [0] * (layers - count)

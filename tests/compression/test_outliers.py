"""One token with massive activations does not decide how the others are compressed."""

from dataclasses import replace

import pytest
import torch

from tests.compression.methods.one_layer import OneLayer, one_layer
from vllm_gac.compression.methods.base import MeasuredLayer
from vllm_gac.compression.methods.registry import compress_layer
from vllm_gac.compression.moments import clip_weights, size_limit
from vllm_gac.compression.passes import observe_layer
from vllm_gac.compression.reference_model import mlp_activations
from vllm_gac.compression.refit import Streams, layer_output, refit_layer


def test_only_tokens_beyond_the_limit_are_scaled() -> None:
    rows = torch.randn(1000, 20, generator=torch.Generator().manual_seed(0))
    limit = size_limit(rows)
    assert bool((clip_weights(rows, limit) == 1).all())
    rows[3] *= 500
    scaled = rows * clip_weights(rows, limit)
    assert float(scaled[3].norm()) == pytest.approx(float(limit), rel=1e-5)
    assert torch.equal(scaled[4:], rows[4:])
    torch.testing.assert_close(size_limit(rows), limit, rtol=0.02, atol=0)
    silent = torch.zeros(9, 4)
    silent[0] = 1
    assert torch.equal(silent * clip_weights(silent, size_limit(silent)), silent)


def with_a_sink(layer: OneLayer) -> tuple[OneLayer, torch.Tensor]:
    """The first token of each sequence gets MLP activations of hundreds of times the usual size."""
    direction = torch.nn.functional.normalize(
        torch.randn(72, generator=torch.manual_seed(5)), dim=0
    )
    hidden = layer.hidden - (layer.hidden @ direction.double())[..., None] * direction
    hidden[:, 0] = 1000 * direction
    weights = dict(layer.weights)
    for name in ("gate", "up"):
        weight = weights[f"mlp.{name}_proj.weight"].clone()
        weight[:3] += 8 * direction
        weights[f"mlp.{name}_proj.weight"] = weight
    return replace(layer, weights=weights, hidden=hidden), hidden


def test_calibration_is_not_led_by_a_sink() -> None:
    layer, hidden = with_a_sink(one_layer())
    model, weights = layer.model, layer.weights
    sizes = mlp_activations(model, weights, hidden).norm(dim=-1)
    assert float(sizes[:, 0].median() / sizes[:, 1:].median()) > 100
    stats, _ = observe_layer(model, 0, weights, hidden)
    ordinary, _ = observe_layer(model, 0, weights, hidden[:, 1:])
    target = layer.target(width=64)

    def error(of: MeasuredLayer) -> float:
        small = compress_layer(of, target)
        left = layer_output(model, layer.dense, weights, hidden)[:, 1:]
        return float((layer_output(model, target, small, hidden)[:, 1:] - left).square().mean())

    measured = MeasuredLayer(layer.layout, weights, stats, model.inv_freq)
    best = replace(measured, covariances={**stats, "mlp.down_proj": ordinary["mlp.down_proj"]})
    assert error(measured) < 1.3 * error(best)


def test_a_refit_is_not_led_by_a_sink() -> None:
    layer, hidden = with_a_sink(one_layer())
    many = hidden.repeat(4, 1, 1)
    many[:, 1:] += 1e-2 * torch.randn(many[:, 1:].shape, generator=torch.manual_seed(1))
    target = layer.target(width=64)
    before = layer.compressed(target)
    given = Streams(many, many)
    after, leaving = refit_layer(layer.model, 0, layer.weights, target, before, given)

    def error(weights: dict[str, torch.Tensor]) -> float:
        small = layer_output(layer.model, target, weights, many)
        return float((small - leaving.dense)[:, 1:].square().mean())

    assert error(after) < 1.05 * error(before)

"""The refit of a layer: it makes up for what layers before have lost, and never does harm."""

from dataclasses import replace

import torch

from tests.compression.methods.one_layer import OneLayer, one_layer
from vllm_gac.compression.refit import Streams, layer_output, refit_layer
from vllm_gac.layout.dims import LayerLayout


def streams(lost: float, seed: int, count: int = 32) -> Streams:
    """States that enter a layer; a compressed layer before has lost a share of some directions."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.logspace(0, -2, 72, dtype=torch.float64)
    dense = torch.randn(count, 40, 72, generator=generator, dtype=torch.float64) * spread
    kept = torch.ones(72, dtype=torch.float64)
    kept[:8] -= lost
    return Streams(dense, dense * kept)


def error(
    layer: OneLayer, target: LayerLayout, weights: dict[str, torch.Tensor], given: Streams
) -> float:
    """The mean squared difference of what leaves the compressed layer and the dense one."""
    dense = layer_output(layer.model, layer.dense, layer.weights, given.dense)
    small = layer_output(layer.model, target, weights, given.small)
    return float((dense - small).square().mean())


def test_a_refitted_layer_is_nearer_to_the_dense_model_on_unseen_text() -> None:
    layer = one_layer()
    for target in (
        layer.target(width=64),
        layer.target(key=("latent", 4, 8), value=(4, 8), width=64),
        layer.target(ranks={"self_attn.o_proj": 30, "mlp.down_proj": 30, "mlp.up_proj": 30}),
    ):
        before = layer.compressed(target)
        for lost in (0.0, 0.3):
            given = streams(lost, 0)
            after, left = refit_layer(layer.model, 0, layer.weights, target, before, given)
            assert torch.equal(left.small, layer_output(layer.model, target, after, given.small))
            unseen = streams(lost, 1)
            old, new = (error(layer, target, weights, unseen) for weights in (before, after))
            assert new <= 1.01 * old
            if lost:
                assert new < 0.9 * old
            changed = {name for name in after if not torch.equal(after[name], before[name])}
            assert {name.split("_proj")[0] for name in changed} <= {"self_attn.o", "mlp.down"}


def test_a_refit_without_effect_changes_nothing() -> None:
    layer = one_layer()
    dense = dict(layer.weights)
    same = streams(0.0, 0)
    after, left = refit_layer(layer.model, 0, dense, layer.dense, dense, same)
    assert all(torch.equal(after[name], dense[name]) for name in dense)
    torch.testing.assert_close(
        left.dense, layer_output(layer.model, layer.dense, dense, same.dense)
    )
    # What is missing has nothing to do with what the layer gets.
    noise = torch.randn(same.dense.shape, generator=torch.Generator().manual_seed(3)).double()
    unrelated = Streams(same.dense, same.small + 1e-3 * noise)
    after, _ = refit_layer(layer.model, 0, dense, layer.dense, dense, unrelated)
    change = max(float((after[n] - dense[n]).norm() / dense[n].norm()) for n in dense)
    assert change < 0.05


def test_too_few_sequences_to_hold_any_out_change_nothing() -> None:
    layer = one_layer()
    target = layer.target(width=64)
    before = layer.compressed(target)
    few = streams(0.3, 0, count=7)
    after, _ = refit_layer(layer.model, 0, layer.weights, target, before, few)
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_the_fit_is_least_squares() -> None:
    """Without anything lost but a scale of o_proj, the refit finds the scale again."""
    layer = one_layer()
    dense = dict(layer.weights)
    scaled = dense | {"self_attn.o_proj.weight": 0.5 * dense["self_attn.o_proj.weight"]}
    same = streams(0.0, 0, count=64)
    after, _ = refit_layer(layer.model, 0, dense, replace(layer.dense), scaled, same)
    name = "self_attn.o_proj.weight"
    assert float((after[name] - dense[name]).norm() / dense[name].norm()) < 0.15
    assert error(layer, layer.dense, after, streams(0.0, 1)) < 1e-3 * error(
        layer, layer.dense, scaled, streams(0.0, 1)
    )

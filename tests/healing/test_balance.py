"""The scales at which pairs of factors are trained."""

import torch

from tests.alignment.random_models import gac_config
from tests.healing.test_student import LAYER, LAYOUT
from tests.support.dense_models import random_weights
from vllm_gac.healing.balance import rate_unit, training_scales
from vllm_gac.layout.dims import layout_of

PREFIX = "model.layers.0."


def unbalanced() -> dict[str, torch.Tensor]:
    """Weights whose first factors have outputs of unit variance, as compression makes them."""
    weights = random_weights(LAYOUT.tensors().items())
    for name, times in (
        ("self_attn.k_up_proj.weight", 300.0),
        ("self_attn.o_proj.weight", 0.004),
        ("self_attn.q_proj.B.weight", 40.0),
    ):
        weights[PREFIX + name] = times * weights[PREFIX + name]
    return weights


def test_a_step_changes_the_outputs_of_each_matrix_by_about_as_much() -> None:
    weights = random_weights(LAYOUT.tensors().items())
    for name in weights:
        weights[name] = len(name) ** 2 * weights[name]
    scales = training_scales(LAYOUT, 0, weights.__getitem__, 0.01)
    for name in weights:
        if name.startswith(PREFIX) and weights[name].ndim > 1:
            scaled = scales[name] * weights[name]
            unit = scaled.square().mean().sqrt() / scaled.shape[-1] ** 0.5
            assert 0.7 < unit / 0.01 < 1.42, name


def test_the_unit_is_that_of_the_middle_layer_or_of_the_nearest_that_has_one() -> None:
    weights = random_weights(LAYOUT.tensors().items())
    for other, middle, unit in ((2.0, 3.0, 3.0 / 8), (2.0, 0.0, 2.0 / 8), (0.0, 0.0, 1 / 28)):
        for index, value in enumerate((other, middle)):
            weights[f"model.layers.{index}.mlp.up_proj.weight"] = torch.full((32, 64), value)
        assert rate_unit(LAYOUT, weights.__getitem__) == unit


def test_factors_of_a_component_have_norms_of_about_the_same_ratio() -> None:
    weights = unbalanced()
    scaled = dict(weights)
    for name, scale in training_scales(LAYOUT, 0, weights.__getitem__, 0.01).items():
        assert torch.equal(scale, scale.log2().round().exp2()), name
        scaled[name] = scale * weights[name]

    def rows(linear: str) -> torch.Tensor:
        found = scaled[f"{PREFIX}{linear}.weight"].square().sum(1)
        bias = scaled.get(f"{PREFIX}{linear}.bias")
        return (found if bias is None else found + bias.square()).sqrt()

    up = scaled[f"{PREFIX}self_attn.k_up_proj.weight"].square().sum(1).flatten().sqrt()
    read = scaled[f"{PREFIX}self_attn.o_proj.weight"].square().sum(0)
    read = read.view(1, -1, 24).sum(1).flatten().sqrt()
    factor = scaled[f"{PREFIX}self_attn.q_proj.B.weight"].square().sum(0).sqrt()
    for first, second in (
        (rows("self_attn.k_proj"), up),
        (rows("self_attn.v_proj"), read),
        (rows("self_attn.q_proj.A"), factor),
    ):
        ratios = (first / second).log2()
        assert ratios.max() - ratios.min() <= 2.02


def test_the_layer_computes_the_same_but_for_one_factor() -> None:
    weights = unbalanced()
    scales = training_scales(LAYOUT, 0, weights.__getitem__, 0.01)
    for first, second in (
        ("self_attn.k_proj.weight", "self_attn.k_up_proj.weight"),
        ("self_attn.q_proj.A.weight", "self_attn.q_proj.B.weight"),
    ):
        up, down = PREFIX + second, PREFIX + first
        product = weights[up].double() @ weights[down].double()
        scaled = (scales[up] * weights[up]).double() @ (scales[down] * weights[down]).double()
        factor = (scaled / product).median().log2().round().exp2()
        assert torch.equal(factor * product, scaled)


def test_latents_that_are_normed_stay() -> None:
    layer = LAYER | {"key": {"form": "latent", "heads": 2, "size": 11}}
    layout = layout_of(gac_config([layer], 16, model_type="qwen3"))
    weights = random_weights(layout.tensors().items())
    for name, scale in training_scales(layout, 0, weights.__getitem__, 0.01).items():
        assert "k_" not in name or scale.numel() == 1, name

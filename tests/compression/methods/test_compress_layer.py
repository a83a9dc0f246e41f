"""Every method through `compress_layer` is exact at full size, and loses gradually below it."""

from dataclasses import replace

import pytest
import torch

from tests.compression.methods.one_layer import HEAD_DIM, OneLayer, one_layer
from vllm_gac.errors import PlanError
from vllm_gac.layout.dims import LINEARS, LayerLayout

LAYERS = {
    "gqa": one_layer(),
    "mha": one_layer(kv_heads=8),
    "qwen2": one_layer(model_type="qwen2"),
    "qwen3": one_layer(model_type="qwen3"),
    "smollm3": one_layer(model_type="smollm3", no_rope_layers=[0]),
    "biased": one_layer(attention_bias=True, mlp_bias=True),
}


@pytest.fixture(params=LAYERS)
def layer(request: pytest.FixtureRequest) -> OneLayer:
    return LAYERS[request.param]


def at(layer: OneLayer, what: str, share: float) -> LayerLayout:
    """The layer compressed by `what`, to this share of its size."""
    heads, single, double = layer.layout.num_key_value_heads, HEAD_DIM, 2 * HEAD_DIM
    size, merged, width = int(share * single), int(share * double), layer.dense.intermediate_size
    if layer.layout.qk_norm and what in ("mixed pairs", "latent of two heads"):
        pytest.skip("not exact with normed keys")
    match what:
        case "selected pairs":
            return layer.target(key=("rotary", heads, size))
        case "mixed pairs":
            return layer.target(("rotary", heads // 2, merged), (heads // 2, double))
        case "latent":
            return layer.target(key=("latent", heads, size))
        case "latent of two heads":
            return layer.target(("latent", heads // 2, merged), (heads // 2, double))
        case "values":
            return layer.target(value=(heads, size))
        case "values of two heads":
            return layer.target(value=(heads // 2, merged))
        case "width":
            return layer.target(width=int(share * width))
        case "all":
            some = ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj")
            ranks = at(layer, "ranks", share).ranks
            return layer.target(
                ("latent", heads, size),
                (heads // 2, merged),
                int(share * width),
                {name: ranks[name] for name in some},
            )
    ranks = {n: int(share * min(layer.layout.linear_shape(layer.dense, n))) for n in LINEARS}
    return layer.target(ranks=ranks)


Shapes = dict[str, tuple[int, ...]]


def shapes(layer: OneLayer, target: LayerLayout) -> Shapes:
    tensors = layer.compressed(target).items()
    return {f"model.layers.0.{name}": tuple(tensor.shape) for name, tensor in tensors}


def planned_shapes(layer: OneLayer, target: LayerLayout) -> Shapes:
    return dict(replace(layer.layout, layers=(target,)).layer_tensors(0))


WHAT = (
    "selected pairs",
    "mixed pairs",
    "latent",
    "latent of two heads",
    "values",
    "values of two heads",
    "width",
    "ranks",
    "all",
)


@pytest.mark.parametrize("what", WHAT)
def test_nothing_is_lost_at_full_size(layer: OneLayer, what: str) -> None:
    target = at(layer, what, 1.0)
    torch.testing.assert_close(layer.output(target), layer.output(), rtol=0, atol=1e-10)
    assert shapes(layer, target) == planned_shapes(layer, target)


@pytest.mark.parametrize("what", WHAT)
def test_error_grows_gradually_as_the_size_falls(layer: OneLayer, what: str) -> None:
    errors = [layer.error(at(layer, what, share)) for share in (0.875, 0.75, 0.5, 0.25)]
    assert 0 < errors[0] < 0.35
    assert errors == sorted(errors)
    assert errors[-1] < 1.5
    target = at(layer, what, 0.25)
    assert shapes(layer, target) == planned_shapes(layer, target)


def test_unchanged_tensors_are_not_copied(layer: OneLayer) -> None:
    small = layer.compressed(at(layer, "width", 0.5))
    for name, tensor in layer.weights.items():
        shrinks = name.startswith("mlp.") and name != "mlp.down_proj.bias"
        assert (small[name] is tensor) != shrinks, name


def test_an_impossible_number_of_heads_is_refused(layer: OneLayer) -> None:
    with pytest.raises(PlanError, match="1 value heads cannot be made of"):
        layer.compressed(layer.target(value=(1, 8)))

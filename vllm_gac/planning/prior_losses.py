"""What compression costs, before anything is measured on the model at hand.

Losses in nats per token (logarithms of perplexity ratios) at shares of a layer's dims, each
compressed alone in every layer: means of two small Llamas with eight query and four KV heads of
128 (the demo model, and one of 28 M parameters). Their order and their bends are what the uniform
plan goes by; the amounts are another model's.
"""

import itertools
from collections.abc import Sequence

from vllm_gac.layout.dims import LayerLayout, ModelLayout

_SHARES = (0.0, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0)
# By (form, heads made one) and share of the dense key elements.
_KEYS = {
    ("rotary", 1): (2.0, 0.49, 0.27, 0.146, 0.069, 0.020, 0.002, 0.0),
    ("rotary", 2): (2.0, 0.43, 0.22, 0.120, 0.052, 0.024, 0.004, 0.0),
    ("latent", 1): (2.0, 0.070, 0.022, 0.0085, 0.0040, 0.0020, 0.0004, 0.0),
    ("latent", 2): (2.0, 0.022, 0.0070, 0.0032, 0.0014, 0.0006, 0.0001, 0.0),
}
# By heads made one and share of the dense value elements.
_VALUES = {
    1: (2.0, 0.21, 0.086, 0.036, 0.016, 0.0070, 0.0020, 0.0),
    2: (2.0, 0.065, 0.022, 0.0097, 0.0050, 0.0022, 0.0006, 0.0),
}
# By share of the MLP's channels.
_WIDTHS = (3.0, 0.90, 0.60, 0.40, 0.23, 0.125, 0.050, 0.0)
# A linear that keeps that share of its parameters as factors loses this much of the above.
_FACTORIZED = {"mlp": 0.7 / 3, "self_attn": 0.17 / 4}


def expected_loss(dense: ModelLayout, layers: Sequence[LayerLayout]) -> float:
    """Nats per token by which a model of `layers` is expected to be worse than `dense`."""
    distinct = {id(layer): layer for layer in layers}  # of hundreds a plan makes two
    known = {number: _layer_loss(dense, layer) for number, layer in distinct.items()}
    return sum(known[id(layer)] for layer in layers) / len(layers)


def _layer_loss(dense: ModelLayout, layer: LayerLayout) -> float:
    """The loss if every layer were like this one: what its parts lose alone, added up."""
    heads, elements = dense.num_key_value_heads, dense.num_key_value_heads * dense.head_dim
    key = _KEYS[layer.key.form, heads // layer.key.heads]
    value = _VALUES[heads // layer.value.heads]
    width = layer.intermediate_size / dense.layers[0].intermediate_size
    loss = (
        _at(key, layer.key.heads * layer.key.size / elements)
        + _at(value, layer.value.heads * layer.value.size / elements)
        + _at(_WIDTHS, width)
    )
    for name, rank in layer.ranks.items():
        rows, columns = dense.linear_shape(layer, name)
        kept = min(1.0, rank * (rows + columns) / (rows * columns))
        loss += _FACTORIZED[name.split(".")[0]] * _at(_WIDTHS, kept)
    return loss


def _at(losses: Sequence[float], share: float) -> float:
    """Linear interpolation at `share` in [0, 1]."""
    points = itertools.pairwise(zip(_SHARES, losses, strict=True))
    for (left, high), (right, low) in points:
        if share <= right:
            return high + (low - high) * (share - left) / (right - left)
    return losses[-1]

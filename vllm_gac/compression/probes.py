"""Probes: compress one part of one layer at a time, and measure how much worse the model gets.

The errors of a method compare the dims of one part of one layer. They cannot be compared between
layers or methods. So every part is probed at two sizes, while everything else stays dense. Each
probe gives two numbers: the divergence of the model's predictions from those of the dense model,
which has little noise; and the increase of the loss on the text, which is noisy but is what counts.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal, TypeAlias, get_args

import torch
from tqdm import tqdm

from vllm_gac.checkpoint.open import TensorReader
from vllm_gac.compression.methods.base import MeasuredLayer
from vllm_gac.compression.methods.compress_layer import compress_layer
from vllm_gac.compression.reference_model import (
    Reference,
    batches,
    embed,
    head_weights,
    layer_forward,
    layer_weights,
    unembed,
)
from vllm_gac.layout.dims import (
    LINEARS,
    KeyLayout,
    LayerLayout,
    ModelLayout,
    ValueLayout,
    breakeven_rank,
)

Part: TypeAlias = Literal["rotary", "latent", "value", "width", "rank.self_attn", "rank.mlp"]
PARTS: tuple[Part, ...] = get_args(Part)
METHOD_PARTS: Mapping[str, tuple[Part, ...]] = {
    "heads": ("rotary", "latent", "value"),
    "prune": ("width",),
    "lowrank": ("rank.self_attn", "rank.mlp"),
}
# Shares of the dense dim (for ranks: of the parameters) of the stronger and of the weaker probe.
_SHARES: Mapping[Part, tuple[float, float]] = {
    "rotary": (0.5, 0.75),
    "latent": (0.25, 0.5),
    "value": (0.25, 0.625),
    "width": (0.5, 0.8),
    "rank.self_attn": (0.5, 0.8),
    "rank.mlp": (0.5, 0.8),
}


@dataclass(frozen=True, slots=True)
class Probe:
    """The dims of a layer in which one part is smaller."""

    part: Part
    layer: LayerLayout


def probes(dense: ModelLayout, methods: Sequence[str]) -> list[Probe]:
    """The probes of any layer of `dense`: for every part the stronger one, then the weaker one."""
    parts = [part for method in METHOD_PARTS if method in methods for part in METHOD_PARTS[method]]
    return [Probe(part, _smaller(dense, part, share)) for part in parts for share in _SHARES[part]]


def _smaller(dense: ModelLayout, part: Part, share: float) -> LayerLayout:
    layer, heads = dense.layers[0], dense.num_key_value_heads
    match part:
        case "rotary":
            size = max(2, int(dense.head_dim * share) // 2 * 2)
            return replace(layer, key=KeyLayout("rotary", heads, size, rope_table=True))
        case "latent":
            size = max(1, int(dense.head_dim * share))
            return replace(layer, key=KeyLayout("latent", heads, size))
        case "value":
            return replace(layer, value=ValueLayout(heads, max(1, int(dense.head_dim * share))))
        case "width":
            width = max(1, int(layer.intermediate_size * share))
            return replace(layer, intermediate_size=width)
    ranks = {}
    for name in LINEARS:
        if name.startswith(part.removeprefix("rank.")):
            ranks[name] = max(1, int(breakeven_rank(dense, layer, name, share)))
    return replace(layer, ranks=MappingProxyType(ranks))


def measure(
    model: Reference,
    read: TensorReader,
    statistics: Callable[[int], Mapping[str, torch.Tensor]],
    tokens: torch.Tensor,
    tried: Sequence[Probe],
    *,
    progress: bool = False,
) -> torch.Tensor:
    """Measure every probe in every layer, in one pass over the layers.

    The hidden states of all probes so far are kept on the model's device.

    Args:
        model: The dense model.
        read: Reads its tensors.
        statistics: Returns the statistics of a layer by its index, as methods use them.
        tokens: Token ids [count, length].
        tried: The probes of a layer.
        progress: Whether to show a progress bar on stderr.

    Returns:
        [layers, probes, 2]: the Kullback-Leibler divergence from the dense model's predictions and
        the increase of the loss, both in nats per token.
    """
    dense, count = model.layout, len(model.layout.layers)
    states = {(-1, 0): embed(model, read, tokens)}  # the dense model's own
    with tqdm(total=count, desc="probe", unit="layer", disable=not progress) as bar:
        for index in range(count):
            weights = layer_weights(model, read, index)
            measured = MeasuredLayer(dense, weights, statistics(index), model.inv_freq)
            entering = states[-1, 0]
            states = {
                key: _forward(model, dense.layers[index], weights, hidden)
                for key, hidden in states.items()
            }
            for number, probe in enumerate(tried):
                smaller = _in_dtype(compress_layer(measured, probe.layer), model.dtype)
                states[index, number] = _forward(model, probe.layer, smaller, entering)
            bar.update()
    return _distances(model, read, tokens, states, count, len(tried))


def _forward(
    model: Reference,
    layer: LayerLayout,
    weights: Mapping[str, torch.Tensor],
    hidden: torch.Tensor,
) -> torch.Tensor:
    return torch.cat([layer_forward(model, layer, weights, batch) for batch in batches(hidden)])


def _in_dtype(weights: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {name: tensor.to(dtype) for name, tensor in weights.items()}


def _distances(
    model: Reference,
    read: TensorReader,
    tokens: torch.Tensor,
    states: Mapping[tuple[int, int], torch.Tensor],
    layers: int,
    tried: int,
) -> torch.Tensor:
    """As `measure`, one sequence at a time, so that memory holds the logits of one sequence."""
    last = head_weights(model, read)

    def log_probabilities(hidden: torch.Tensor) -> torch.Tensor:
        return torch.log_softmax(unembed(model, last, hidden)[:-1].float(), -1)

    sums = torch.zeros(layers, tried, 2, dtype=torch.float64)
    for row, sequence in enumerate(tokens):
        targets = sequence[1:, None].to(model.device)
        dense = log_probabilities(states[-1, 0][row])
        weight, loss = dense.exp(), -dense.gather(1, targets).sum()
        for (index, number), hidden in states.items():
            if index >= 0:
                probed = log_probabilities(hidden[row])
                divergence = (weight * (dense - probed)).sum()
                increase = -probed.gather(1, targets).sum() - loss
                sums[index, number] += torch.stack((divergence, increase)).double().cpu()
    return sums / (tokens.shape[0] * (tokens.shape[1] - 1))

"""A backward pass through a dense model, one layer in memory at a time.

A forward pass keeps the hidden states that enter every layer. Then each layer, from the last to the
first, runs again with autograd and receives the gradients of its output.

The loss is the cross entropy of the next token, drawn from what the model itself predicts, so that
the mean square of a gradient is the Fisher information. Tokens may be drawn several times.
"""

import logging
import math
from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch
from torch.nn.functional import linear
from tqdm import tqdm

from vllm_gac.compression.reference_model import (
    Reference,
    embed,
    head_weights,
    last_norm,
    layer_outputs,
    layer_weights,
)
from vllm_gac.layout.dims import ModelLayout

logger = logging.getLogger(__name__)

# Where a backward pass was stopped: how many layers are left, and the gradients
# [draws, count, length, hidden] by what leaves the last of them.
Stopped: TypeAlias = tuple[int, torch.Tensor]
# Called with the index of each layer, the last one first, what was measured of it by name, and the
# gradients [draws, count, length, hidden] by what enters it.
Keep: TypeAlias = Callable[[int, Mapping[str, torch.Tensor], torch.Tensor], object]

_SEED = 0
# Tokens whose logits are in memory at once.
ROWS = 512


def backward(
    model: Reference,
    read: Callable[[str], torch.Tensor],
    tokens: torch.Tensor,
    through: Callable[[int, Mapping[str, torch.Tensor], torch.Tensor, torch.Tensor], torch.Tensor],
    *,
    draws: int = 1,
    beside: int = 0,
    stopped: Stopped | None = None,
    description: str = "gradients",
    progress: bool = False,
) -> None:
    """Run `tokens` [count, length] forward, and the gradients of their losses back.

    `through` is called with each layer, the last one first: its index, its weights, the hidden
    states [count, length, hidden] that enter it and the gradients [draws, count, length, hidden] by
    what leaves it, both on the model's home. It returns the gradients by what enters. What it
    computes beside them takes about as long as so many passes. Of a `stopped` pass, only the layers
    that are left are run.
    """
    layers = stopped[0] if stopped else len(model.layout.layers)
    logger.info("%s: %d layers", description, layers)
    # In passes through a layer: forward again and the gradients of each draw, and the unembedding.
    back, head = 1 + draws + beside, 0 if stopped else _head_passes(model.layout)
    total = layers * (1 + back) + head
    with tqdm(total=total, desc=description, smoothing=0, disable=not progress) as bar:
        states = entering_states(model, read, tokens, layers, bar.update)
        left = states.pop()
        gradients = stopped[1] if stopped else head_gradients(model, read, left, draws)
        bar.update(head)
        for index in reversed(range(layers)):
            weights = layer_weights(model, read, index)
            gradients = through(index, weights, states.pop(), gradients)
            bar.update(back)


def _head_passes(layout: ModelLayout) -> int:
    """To how many passes through a layer `head_gradients` comes, which multiplies by E twice."""
    return round(2 * layout.vocab_size * layout.hidden_size / layer_parameters(layout))


def layer_parameters(layout: ModelLayout) -> int:
    """The number of weights in one layer."""
    return sum(math.prod(shape) for _, shape in layout.layer_tensors(0))


def entering_states(
    model: Reference,
    read: Callable[[str], torch.Tensor],
    tokens: torch.Tensor,
    count: int | None = None,
    advance: Callable[[], object] = lambda: None,
) -> list[torch.Tensor]:
    """The states [sequences, length, d] that enter the first `count` layers, and leave the last.

    They are on the model's home. `advance` is called after each layer.
    """
    states = [embed(model, read, tokens).to(model.home)]
    with torch.no_grad():
        for index, layer in enumerate(model.layout.layers[:count]):
            weights = layer_weights(model, read, index)
            states.append(layer_outputs(model, layer, weights, states[-1]))
            advance()
    return states


def head_gradients(
    model: Reference, read: Callable[[str], torch.Tensor], hidden: torch.Tensor, draws: int
) -> torch.Tensor:
    """Gradients of each sequence's loss, summed over its tokens, by the last layer's output.

    Args:
        model: The dense model.
        read: Reads its tensors.
        hidden: What leaves the last layer, [count, length, hidden].
        draws: How often tokens are drawn.

    Returns:
        [draws, count, length, hidden] where `hidden` is. Those of the last token, which predicts
        nothing, are zero.
    """
    norm, unembedding = head_weights(model, read)
    generator = torch.Generator().manual_seed(_SEED)
    gradients = torch.zeros(draws, *hidden.shape, dtype=model.dtype, device=hidden.device)
    for number, states in enumerate(hidden):
        for start, some in enumerate(states[:-1].split(ROWS)):
            leaf = some.to(model.device).requires_grad_()
            normed = last_norm(model, norm, leaf)
            shares = linear(normed.detach(), unembedding).softmax(-1)
            by_normed = shares @ unembedding
            for draw, following in enumerate(_drawn(shares, draws, generator)):
                (gradient,) = torch.autograd.grad(
                    normed, leaf, by_normed - unembedding[following], retain_graph=True
                )
                gradients[draw, number, start * ROWS :][: len(some)] = gradient
    return gradients


def _drawn(shares: torch.Tensor, draws: int, generator: torch.Generator) -> torch.Tensor:
    """Tokens [draws, rows] by their `shares` [rows, vocab]; the same on every device."""
    points = torch.rand(len(shares), draws, generator=generator, dtype=torch.float64)
    sums = shares.cumsum(-1, dtype=torch.float64)
    drawn = torch.searchsorted(sums, points.to(shares.device) * sums[:, -1:])
    return drawn.T.clamp_max(shares.shape[1] - 1)

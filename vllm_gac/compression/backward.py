"""A backward pass through a dense model, one layer in memory at a time.

A forward pass keeps the hidden states that enter every layer. Then each layer, from the last to the
first, runs again with autograd and receives the gradient of its output.
"""

from collections.abc import Callable, Mapping

import torch
from torch.nn.functional import cross_entropy
from tqdm import tqdm

from vllm_gac.compression.reference_model import (
    Reference,
    embed,
    head_weights,
    layer_outputs,
    layer_weights,
    unembed,
)


def backward(
    model: Reference,
    read: Callable[[str], torch.Tensor],
    tokens: torch.Tensor,
    through: Callable[[int, Mapping[str, torch.Tensor], torch.Tensor, torch.Tensor], torch.Tensor],
    *,
    seed: int | None = None,
    progress: bool = False,
) -> None:
    """Run `tokens` [count, length] forward, and the gradient of their loss back.

    `through` is called with each layer, the last one first: its index, its weights, the hidden
    states that enter it and the gradient by what leaves it, both [count, length, hidden] on the
    CPU. It returns the gradient by what enters. The loss is as for `head_gradient`.
    """
    layers = len(model.layout.layers)
    with tqdm(total=2 * layers, desc="gradients", unit="layer", disable=not progress) as bar:
        states = entering_states(model, read, tokens, bar.update)
        gradient = head_gradient(model, read, states.pop(), tokens, seed)
        for index in reversed(range(layers)):
            weights = layer_weights(model, read, index)
            gradient = through(index, weights, states.pop(), gradient)
            bar.update()


def entering_states(
    model: Reference,
    read: Callable[[str], torch.Tensor],
    tokens: torch.Tensor,
    advance: Callable[[], object] = lambda: None,
) -> list[torch.Tensor]:
    """The hidden states [count, length, d] that enter each layer, and those that leave the last.

    They are on the CPU. `advance` is called after each layer.
    """
    states = [embed(model, read, tokens).cpu()]
    with torch.no_grad():
        for index, layer in enumerate(model.layout.layers):
            weights = layer_weights(model, read, index)
            states.append(layer_outputs(model, layer, weights, states[-1]))
            advance()
    return states


def head_gradient(
    model: Reference,
    read: Callable[[str], torch.Tensor],
    hidden: torch.Tensor,
    tokens: torch.Tensor,
    seed: int | None = None,
) -> torch.Tensor:
    """Gradient of each sequence's loss, summed over its tokens, by the last layer's output.

    The loss is the cross entropy of the next token: the one of `tokens` [count, length], or with a
    `seed` one that is drawn from what the model predicts.
    """
    last, gradients = head_weights(model, read), []
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    for states, sequence in zip(hidden, tokens, strict=True):
        leaf = states.to(model.device).requires_grad_()
        logits = unembed(model, last, leaf)[:-1]
        following = sequence[1:].to(model.device)
        if generator is not None:
            following = _drawn(logits.detach(), generator)
        loss = cross_entropy(logits, following, reduction="sum")
        gradients.append(torch.autograd.grad(loss, leaf)[0].cpu())
    return torch.stack(gradients)


def _drawn(logits: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """A token [length] for each row of `logits` [length, vocab]; the same on every device."""
    shares = torch.rand(len(logits), 1, generator=generator, dtype=torch.float64)
    sums = logits.double().softmax(-1).cumsum(-1)
    drawn = torch.searchsorted(sums, shares.to(logits.device) * sums[:, -1:])
    return drawn[:, 0].clamp_max(logits.shape[1] - 1)

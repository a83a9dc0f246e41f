"""A backward pass through a dense model, one layer in memory at a time.

A forward pass keeps the hidden states that enter every layer. Then each layer, from the last to the
first, runs again with autograd and receives the gradient of its output.
"""

from collections.abc import Callable

import torch
from torch.nn.functional import cross_entropy

from vllm_gac.compression.reference_model import (
    Reference,
    batches,
    embed,
    head_weights,
    layer_forward,
    layer_weights,
    unembed,
)


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
            outputs = (
                layer_forward(model, layer, weights, batch.to(model.device))
                for batch in batches(states[-1])
            )
            states.append(torch.cat([output.cpu() for output in outputs]))
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

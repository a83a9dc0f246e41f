"""Probes: compress one part of one layer at a time, and estimate how much worse the model gets.

The errors of a method compare the dims of one part of one layer. They cannot be compared between
layers or methods. So every part is probed at one size, while everything else stays dense, on text
that no method was fitted to.

A probe changes what its layer puts out by e_t at token t. With the gradient g_t of the loss by that
output, for next tokens that are drawn from the model's own predictions, the model's predictions
diverge by about half the mean of (g_t e_t)^2: the quadratic form of the Fisher information, without
what errors at different tokens have in common. So a backward pass through the dense model and one
layer for each probe are enough, and the time grows in proportion to the layers. The output is
computed at some of the tokens only.

The form says too little of the MLPs of the first layers, which make massive activations: at some
tokens of some texts the layers behind then do something else. So these run too, and a probe loses
at least what the model really does.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch.nn.functional import kl_div

from vllm_gac.compression.backward import Keep, Stopped, backward
from vllm_gac.compression.methods.base import MeasuredLayer, Probe
from vllm_gac.compression.methods.registry import compress_layer
from vllm_gac.compression.reference_model import (
    Reference,
    after_mlp,
    attended_values,
    batches,
    head_weights,
    layer_forward,
    layer_outputs,
    layer_weights,
    project,
    unembed,
)
from vllm_gac.layout.dims import LayerLayout, ModelLayout

# Of the next token of every token.
DRAWS = 2
# One in so many tokens has its output computed, unless sequences are short.
_STEP, _MIN_POSITIONS = 8, 64
# The same of predictions that are compared.
_COMPARED_STEP = 4
# What is measured with all layers behind: of the first quarter of the layers, and so many at most
# that the time still grows in proportion to the layers.
_SHARE, _MAX_LAYERS = 1 / 4, 8


def followed(dense: ModelLayout, tried: Sequence[Probe], index: int) -> list[int]:
    """The numbers of the probes of layer `index` that `measure_followed` is to measure."""
    if index >= min(_MAX_LAYERS, math.ceil(_SHARE * len(dense.layers))):
        return []
    return [number for number, probe in enumerate(tried) if probe.followed]


def positions(length: int, most: int = _STEP) -> torch.Tensor:
    """The tokens [n] of a sequence whose outputs are computed. The last one predicts nothing."""
    step = max(1, min(most, length // _MIN_POSITIONS))
    return torch.arange(step // 2, length - 1, step)


def measure_gradients(
    model: Reference,
    read: Callable[[str], torch.Tensor],
    tokens: torch.Tensor,
    keep: Keep,
    *,
    draws: int = DRAWS,
    stopped: Stopped | None = None,
    progress: bool = False,
) -> None:
    """Gradients of the loss by the output of every layer, for next tokens that are drawn.

    Args:
        model: The dense model.
        read: Reads its tensors.
        tokens: Token ids [count, length], with a length of at least 2.
        keep: What is measured are "gradients" [draws, count, positions, hidden]. Those by what
            enters the first layer are not computed.
        draws: How often the next token of every token is drawn.
        stopped: Where a pass to go on with was stopped.
        progress: Whether to show a progress bar on stderr.
    """
    at = positions(tokens.shape[1])

    def through(
        index: int,
        weights: Mapping[str, torch.Tensor],
        hidden: torch.Tensor,
        incoming: torch.Tensor,
    ) -> torch.Tensor:
        outgoing, begin = torch.empty_like(incoming), 0
        for states in batches(hidden) if index else ():
            rows = slice(begin, begin := begin + len(states))
            entering = states.to(model.device).requires_grad_()
            left = layer_forward(model, model.layout.layers[index], weights, entering)
            for draw, gradient in enumerate(incoming[:, rows]):
                (by_input,) = torch.autograd.grad(
                    left, entering, gradient.to(model.device), retain_graph=True
                )
                outgoing[draw, rows] = by_input
        keep(index, {"gradients": incoming[:, :, at].contiguous()}, outgoing)
        return outgoing

    backward(
        model,
        read,
        tokens,
        through,
        draws=draws,
        stopped=stopped,
        description="probe gradients",
        progress=progress,
    )


def measure_layer(
    model: Reference,
    layer: MeasuredLayer,
    tried: Sequence[Probe],
    hidden: torch.Tensor,
    gradients: torch.Tensor,
) -> torch.Tensor:
    """What each probe of a layer is expected to lose.

    Args:
        model: The dense model.
        layer: The layer and its statistics.
        tried: The probes.
        hidden: The hidden states that enter it, [count, length, hidden].
        gradients: Those of `measure_gradients`.

    Returns:
        fp32 [probes, count], in nats per token of each sequence.
    """
    at = positions(hidden.shape[1]).to(model.device)
    whole = layer.as_in_it(model.layout.layers[0])
    dense = list(_outputs(model, whole, layer.weights, hidden, at))
    divergence = torch.empty(len(tried), len(hidden))
    for number, probe in enumerate(tried):
        smaller = _compressed(model, layer, probe.layer)
        known = [middle for middle, _ in dense] if _keeps_attention(layer, smaller) else None
        begin = 0
        for (_, before), (_, after) in zip(
            dense,
            _outputs(model, layer.as_in_it(probe.layer), smaller, hidden, at, known),
            strict=True,
        ):
            rows = slice(begin, begin := begin + len(after))
            products = torch.einsum(
                "dnph,nph->dnp", gradients[:, rows].to(model.device), after - before
            )
            divergence[number, rows] = (products.square().mean((0, 2)) / 2).cpu().float()
    return divergence


def measure_followed(
    model: Reference,
    read: Callable[[str], torch.Tensor],
    index: int,
    layer: MeasuredLayer,
    target: LayerLayout,
    hidden: torch.Tensor,
    last: torch.Tensor,
) -> float:
    """What the model loses with one layer compressed, in nats per token.

    Args:
        model: The dense model.
        read: Reads its tensors.
        index: The number of the layer.
        layer: The layer and its statistics.
        target: Its dims.
        hidden: The hidden states that enter it, [count, length, hidden].
        last: Those that leave the last layer of the dense model.
    """
    smaller = _compressed(model, layer, target)
    states = layer_outputs(model, layer.as_in_it(target), smaller, hidden)
    for behind in range(index + 1, len(model.layout.layers)):
        weights = layer_weights(model, read, behind)
        states = layer_outputs(model, model.layout.layers[behind], weights, states)
    head, at = head_weights(model, read), positions(hidden.shape[1], _COMPARED_STEP)
    lost = 0.0
    for pair in zip(states, last, strict=True):
        after, before = (
            unembed(model, head, one[at].to(model.device)).log_softmax(-1) for one in pair
        )
        lost += float(kl_div(after, before, reduction="sum", log_target=True))
    return lost / (len(states) * len(at))


def _compressed(
    model: Reference, layer: MeasuredLayer, target: LayerLayout
) -> dict[str, torch.Tensor]:
    """The tensors of a layer with the dims of `target`, in the model's dtype."""
    return {name: t.to(model.dtype) for name, t in compress_layer(layer, target).items()}


def _outputs(
    model: Reference,
    layer: LayerLayout,
    weights: Mapping[str, torch.Tensor],
    hidden: torch.Tensor,
    at: torch.Tensor,
    middles: Sequence[torch.Tensor] | None = None,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The hidden states after attention and after the MLP, by batch, of tokens `at` positions.

    The first of them may be known.
    """
    for number, batch in enumerate(batches(hidden)):
        if middles is None:
            states = batch.to(model.device)
            attended = attended_values(model, layer, weights, states, at=at)
            middle = states[:, at] + project(weights, "self_attn.o_proj", attended)
        else:
            middle = middles[number]
        yield middle, after_mlp(model, weights, middle)


def _keeps_attention(layer: MeasuredLayer, smaller: Mapping[str, torch.Tensor]) -> bool:
    """Whether the attention of a probe is the dense layer's."""
    return all(
        smaller.get(name) is tensor
        for name, tensor in layer.weights.items()
        if name.startswith("self_attn.")
    )

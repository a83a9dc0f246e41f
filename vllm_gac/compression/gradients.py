"""Statistics from gradients of the loss: one backward pass, one layer at a time.

A forward pass keeps the hidden states that enter every layer. Then each layer, from the last to the
first, runs again with autograd and receives the gradient of its output, so that memory holds the
weights and gradients of one layer. Three things are measured:

fisher         [layers, linears] the score of each of LINEARS in PaLU's rank search
taylor         [layers, width] the score of each MLP channel in LLM-Pruner
kfac.{linear}  [layers, full + 1] what a linear is expected to lose at every rank, nats per token
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import cross_entropy
from tqdm import tqdm

from vllm_gac.compression.methods.base import MeasuredLayer
from vllm_gac.compression.methods.lowrank import LowRank
from vllm_gac.compression.reference_model import (
    Reference,
    batches,
    embed,
    head_weights,
    layer_forward,
    layer_weights,
    unembed,
)
from vllm_gac.layout.dims import LINEARS


def measure_gradients(
    model: Reference,
    read: Callable[[str], torch.Tensor],
    covariances: Callable[[int], Mapping[str, torch.Tensor]],
    tokens: torch.Tensor,
    linears: Sequence[str] = LINEARS,
    *,
    progress: bool = False,
) -> dict[str, torch.Tensor]:
    """Fisher and Taylor scores, and K-FAC's curves of `linears`, by the names above.

    `model` is dense. `covariances` returns the covariances of a layer by its index. The loss is
    the cross entropy of the next token over `tokens` [count, length]. The hidden states of all
    layers are kept on the CPU.
    """
    layers = len(model.layout.layers)
    found: list[dict[str, torch.Tensor]] = []
    with tqdm(total=2 * layers, desc="gradients", unit="layer", disable=not progress) as bar:
        states = _entering(model, read, tokens, bar.update)
        incoming = _head_gradient(model, read, states.pop(), tokens)
        for index in reversed(range(layers)):
            weights = layer_weights(model, read, index)
            gradients = _backward(model, index, weights, states.pop(), incoming)
            layer = MeasuredLayer(model.layout, weights, covariances(index), model.inv_freq)
            curves = {
                f"kfac.{name}": LowRank(name).second_order_losses(layer, gradients.outputs[name])
                for name in linears
            }
            found.insert(0, {**_scores(weights, gradients), **curves})
            incoming = gradients.hidden
            bar.update()
    return {name: torch.stack([layer[name].cpu() for layer in found]) for name in found[0]}


def _entering(
    model: Reference,
    read: Callable[[str], torch.Tensor],
    tokens: torch.Tensor,
    advance: Callable[[], object],
) -> list[torch.Tensor]:
    """The hidden states [count, length, d] that enter each layer, and those that leave the last."""
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


def _head_gradient(
    model: Reference,
    read: Callable[[str], torch.Tensor],
    hidden: torch.Tensor,
    tokens: torch.Tensor,
) -> torch.Tensor:
    """Gradient of each sequence's loss, summed over its tokens, by the last layer's output."""
    last, gradients = head_weights(model, read), []
    for states, sequence in zip(hidden, tokens, strict=True):
        leaf = states.to(model.device).requires_grad_()
        logits = unembed(model, last, leaf)[:-1]
        loss = cross_entropy(logits, sequence[1:].to(model.device), reduction="sum")
        gradients.append(torch.autograd.grad(loss, leaf)[0].cpu())
    return torch.stack(gradients)


@dataclass(frozen=True, slots=True)
class _Gradients:
    """The gradients of the losses of whole sequences, for one layer.

    Attributes:
        hidden: By the layer's input, [count, length, hidden].
        outputs: By the output of each linear, [tokens, out], for the tokens that predict a token.
        weights: By the weight of each linear [out, in]: the gradient of a sequence's mean loss,
            averaged over the sequences.
        squares: The same with squared gradients.
    """

    hidden: torch.Tensor
    outputs: Mapping[str, torch.Tensor]
    weights: Mapping[str, torch.Tensor]
    squares: Mapping[str, torch.Tensor]


def _backward(
    model: Reference,
    index: int,
    weights: Mapping[str, torch.Tensor],
    hidden: torch.Tensor,
    incoming: torch.Tensor,
) -> _Gradients:
    """Run layer `index` on its `hidden` states and back with the `incoming` gradients."""
    leaves = {name: weights[f"{name}.weight"].detach().requires_grad_() for name in LINEARS}
    trained = {**weights, **{f"{name}.weight": leaf for name, leaf in leaves.items()}}
    count, predicted = len(hidden), hidden.shape[1] - 1
    sums = {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    squares = {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
    outgoing: list[torch.Tensor] = []
    by_output: dict[str, list[torch.Tensor]] = {name: [] for name in LINEARS}
    # PaLU's score needs the gradient of every sequence by itself.
    for states, gradient in zip(hidden, incoming, strict=True):
        outputs: dict[str, torch.Tensor] = {}
        entering = states[None].to(model.device).requires_grad_()
        left = layer_forward(
            model,
            model.layout.layers[index],
            trained,
            entering,
            observe_output=outputs.__setitem__,
        )
        wanted = [entering, *(outputs[n] for n in LINEARS), *(leaves[n] for n in LINEARS)]
        found = torch.autograd.grad(left, wanted, gradient[None].to(model.device))
        outgoing.append(found[0][0].cpu())
        for number, name in enumerate(LINEARS, 1):
            # The last token predicts nothing: its gradient is zero.
            by_output[name].append(found[number][0, :-1].cpu())
            by_weight = found[number + len(LINEARS)] / predicted
            sums[name] += by_weight / count
            squares[name] += by_weight.square() / count
    return _Gradients(
        hidden=torch.stack(outgoing),
        outputs={name: torch.cat(parts) for name, parts in by_output.items()},
        weights=sums,
        squares=squares,
    )


def _scores(weights: Mapping[str, torch.Tensor], gradients: _Gradients) -> dict[str, torch.Tensor]:
    """fisher [linears] and taylor [width] of a layer, fp64.

    PaLU (Chang et al., ICLR 2025): the mean over a linear's weights of the square root of
    Fisher information, E[g^2] over sequences. LLM-Pruner (Ma, Fang and Wang, NeurIPS 2023,
    section 3.2): the element-wise importance of first order, |w g| (`param_first` in its code),
    summed over the weights of a channel in gate_proj, up_proj and down_proj.
    """
    fisher = [gradients.squares[name].sqrt().mean(dtype=torch.float64) for name in LINEARS]

    def channels(name: str, dim: int) -> torch.Tensor:
        products = weights[f"{name}.weight"] * gradients.weights[name]
        return products.abs().sum(dim, dtype=torch.float64)

    taylor = channels("mlp.gate_proj", 1) + channels("mlp.up_proj", 1)
    return {"fisher": torch.stack(fisher), "taylor": taylor + channels("mlp.down_proj", 0)}

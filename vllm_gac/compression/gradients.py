"""Statistics from gradients of the loss: one backward pass, one layer at a time.

A forward pass keeps the hidden states that enter every layer. Then each layer, from the last to the
first, runs again with autograd and receives the gradient of its output, so that memory holds the
weights and gradients of one layer. Two things are measured:

fisher  [layers, linears] the score of each of LINEARS in PaLU's rank search
taylor  [layers, width] the score of each MLP channel in LLM-Pruner
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from vllm_gac.checkpoint.open import TensorReader
from vllm_gac.compression.backward import backward
from vllm_gac.compression.reference_model import Reference, layer_forward
from vllm_gac.layout.dims import LINEARS


def measure_gradients(
    model: Reference, read: TensorReader, tokens: torch.Tensor, *, progress: bool = False
) -> dict[str, torch.Tensor]:
    """Fisher and Taylor scores, by the names above.

    `model` is dense. The loss is the cross entropy of the next token over `tokens` [count, length].
    The hidden states of all layers are kept on the CPU.
    """
    found: list[dict[str, torch.Tensor]] = []

    def through(
        index: int,
        weights: Mapping[str, torch.Tensor],
        hidden: torch.Tensor,
        incoming: torch.Tensor,
    ) -> torch.Tensor:
        gradients = _backward(model, index, weights, hidden, incoming)
        found.insert(0, _scores(weights, gradients))
        return gradients.hidden

    backward(model, read, tokens, through, progress=progress)
    return {name: torch.stack([layer[name].cpu() for layer in found]) for name in found[0]}


@dataclass(frozen=True, slots=True)
class _Gradients:
    """The gradients of the losses of whole sequences, for one layer.

    Attributes:
        hidden: By the layer's input, [count, length, hidden].
        weights: By the weight of each linear [out, in]: the gradient of a sequence's mean loss,
            averaged over the sequences.
        squares: The same with squared gradients.
    """

    hidden: torch.Tensor
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
    # PaLU's score needs the gradient of every sequence by itself.
    for states, gradient in zip(hidden, incoming, strict=True):
        entering = states[None].to(model.device).requires_grad_()
        left = layer_forward(model, model.layout.layers[index], trained, entering)
        wanted = [entering, *(leaves[name] for name in LINEARS)]
        found = torch.autograd.grad(left, wanted, gradient[None].to(model.device))
        outgoing.append(found[0][0].cpu())
        for name, by_weight in zip(LINEARS, found[1:], strict=True):
            mean = by_weight / predicted
            sums[name] += mean / count
            squares[name] += mean.square() / count
    return _Gradients(hidden=torch.stack(outgoing), weights=sums, squares=squares)


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

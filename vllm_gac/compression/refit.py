"""Refit a compressed layer on what the compressed layers before it really feed it.

The methods fit a layer on the inputs that it has in the dense model. In the compressed model its
inputs are others. So the linear layers that write to the residual stream, o_proj and then
down_proj, are fitted once more by least squares, so that the stream comes as close to that of the
dense model as it can: what the layers before have lost is made up for as far as the layer's own
inputs tell of it.

The fit is a ridge regression towards the weights that are there. How strong the ridge is, and
whether anything changes at all, is decided on sequences that the fit has not seen.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch.nn.functional import linear as apply

from vllm_gac.compression.moments import clip_weights, second_moment, size_limit
from vllm_gac.compression.reference_model import (
    Reference,
    after_mlp,
    attended_values,
    batches,
    cast,
    layer_outputs,
    mlp_activations,
    project,
)
from vllm_gac.layout.dims import LayerLayout

Weights: TypeAlias = Mapping[str, torch.Tensor]

# Ridges, relative to the mean variance of the inputs.
_RIDGES = (1e-3, 1e-2, 1e-1, 1.0)
# One of so many sequences is not fitted on.
_HELD_OUT = 8
# What a fit must gain on them, as a share of the squared error.
_MIN_GAIN = 1e-3


@dataclass(frozen=True, slots=True)
class Streams:
    """Hidden states between two layers for the same tokens, [count, length, hidden].

    Attributes:
        dense: Those of the dense model.
        small: Those of the compressed model.
    """

    dense: torch.Tensor
    small: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Half:
    """Attention or MLP of a compressed `layer`, or of the dense one: what ends with `linear`."""

    model: Reference
    linear: str
    layer: LayerLayout

    def inputs(self, layer: LayerLayout, weights: Weights, hidden: torch.Tensor) -> torch.Tensor:
        """What the linear gets for `hidden` states that enter."""
        if self.linear == "self_attn.o_proj":
            return attended_values(self.model, layer, weights, hidden)
        return mlp_activations(self.model, weights, hidden)

    def forward(self, layer: LayerLayout, weights: Weights, hidden: torch.Tensor) -> torch.Tensor:
        """All `hidden` states after this half of the layer."""
        outputs = torch.empty_like(hidden)
        for batch, leaving in zip(batches(hidden), batches(outputs), strict=True):
            states = batch.to(self.model.device)
            inputs = self.inputs(layer, weights, states)
            leaving.copy_(states + project(weights, self.linear, inputs))
        return outputs


def refit_layer(
    model: Reference,
    index: int,
    dense: Weights,
    layer: LayerLayout,
    weights: Weights,
    streams: Streams,
    keeps_mlp: bool = False,
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Refit o_proj and down_proj of a compressed layer.

    Args:
        model: The dense model.
        index: The layer's number.
        dense: The dense layer's tensors.
        layer: The compressed layer's dims.
        weights: Its tensors.
        streams: The hidden states that enter the layer.
        keeps_mlp: Whether the MLP stays as it is, as experts and packed linear layers do.

    Returns:
        The tensors, with those of o_proj and down_proj in fp64 where they have changed; and the
        hidden states that leave the dense layer.
    """
    refitted, before, dense = dict(weights), model.layout.layers[index], _cast(model, dense)
    attention = _Half(model, "self_attn.o_proj", layer)
    dense_output = attention.forward(before, dense, streams.dense)
    refitted |= _refitted(attention, refitted, streams.small, dense_output)
    if keeps_mlp:
        for states in batches(dense_output):
            states.copy_(after_mlp(model, dense, states.to(model.device)))
        return refitted, dense_output
    entering = attention.forward(layer, _cast(model, refitted), streams.small)
    mlp = _Half(model, "mlp.down_proj", layer)
    dense_output = mlp.forward(before, dense, dense_output)
    return refitted | _refitted(mlp, refitted, entering, dense_output), dense_output


def layer_output(
    model: Reference, layer: LayerLayout, weights: Weights, hidden: torch.Tensor
) -> torch.Tensor:
    """The hidden states that leave a layer, dense or compressed, where those that enter are."""
    return layer_outputs(model, layer, _cast(model, weights), hidden)


def _cast(model: Reference, weights: Weights) -> dict[str, torch.Tensor]:
    """The tensors on the model's device in its dtype; RoPE tables keep theirs."""
    return {
        name: t.to(model.device) if name.endswith("rope_inv_freq") else cast(model, t)
        for name, t in weights.items()
    }


def _refitted(
    half: _Half, weights: Weights, entering: torch.Tensor, wanted: torch.Tensor
) -> dict[str, torch.Tensor]:
    """The last factor of the half's linear, so that `entering` plus its output is near `wanted`."""
    model, linear = half.model, half.linear
    factorized = f"{linear}.B.weight" in weights
    factor = f"{linear}.B.weight" if factorized else f"{linear}.weight"
    small = _cast(model, weights)
    fitted, unseen = (_Moments(small[factor].double()) for _ in range(2))
    number, limits = 0, list[torch.Tensor]()
    for states, target in zip(batches(entering), batches(wanted), strict=True):
        states, target = states.to(model.device), target.to(model.device)
        x = half.inputs(half.layer, small, states)
        missing = target - states - project(small, linear, x)
        if factorized:
            x = apply(x, small[f"{linear}.A.weight"])
        # A token counts no more than a large ordinary one, neither by what it has nor by what it
        # misses.
        rows = [x.flatten(0, -2), missing.flatten(0, -2)]
        limits = limits or [size_limit(row) for row in rows]  # by the first batch
        each = [clip_weights(row, limit) for row, limit in zip(rows, limits, strict=True)]
        share = torch.cat(each, 1).amin(1).view(*x.shape[:-1], 1)
        x, missing = share * x, share * missing
        numbers = torch.arange(number, number + len(states))
        held_out = numbers % _HELD_OUT == _HELD_OUT - 1
        fitted.add(x[~held_out], missing[~held_out])
        unseen.add(x[held_out], missing[held_out])
        number += len(states)
    best, change = -_MIN_GAIN * unseen.energy, None
    for ridge in _RIDGES if unseen.energy else ():
        tried = fitted.solved(ridge)
        if (gain := unseen.increase(tried)) < best:
            best, change = gain, tried
    return {} if change is None else {factor: small[factor].double() + change}


class _Moments:
    """Second moments of inputs x and of what is missing at the output, y."""

    def __init__(self, weight: torch.Tensor) -> None:
        out, into = weight.shape
        self.inner = weight.new_zeros(into, into)
        self.crossed = weight.new_zeros(out, into)
        self.energy = 0.0

    def add(self, x: torch.Tensor, y: torch.Tensor) -> None:
        """Add tokens: x [..., in], y [..., out]."""
        x, y = x.flatten(0, -2), y.flatten(0, -2)
        self.inner += second_moment(x)
        self.crossed += y.T @ x
        self.energy += float(y.square().sum(dtype=torch.float64))

    def solved(self, ridge: float) -> torch.Tensor:
        """The change of the weight [out, in] that fits y best, with a ridge."""
        ridged = self.inner.clone()
        ridged.diagonal().add_(ridge * float(ridged.diagonal().mean()) + 1e-300)
        change: torch.Tensor = torch.linalg.solve(ridged, self.crossed.T).T
        return change

    def increase(self, change: torch.Tensor) -> float:
        """By how much the squared error grows if the weight changes by `change`."""
        return float(((change @ self.inner - 2 * self.crossed) * change).sum())

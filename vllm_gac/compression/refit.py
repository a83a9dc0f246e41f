"""Refit a compressed layer on what the compressed layers before it really feed it.

The methods fit a layer on the inputs that it has in the dense model. In the compressed model its
inputs are others. So the linear layers that write to the residual stream, o_proj and then
down_proj, are fitted once more by least squares, so that the stream comes as close to that of the
dense model as it can: what the layers before have lost is made up for as far as the layer's own
inputs tell of it.

The fit is a ridge regression towards the weights that are there. How strong the ridge is, and
whether anything changes at all, is decided on sequences that the fit has not seen.

A run holds the hidden states that enter the next layer, dense and compressed. After a stop, the
layers that were made run once more, which takes a small part of the time of making them.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch
from torch.nn.functional import linear as apply

from vllm_gac.checkpoint.layer_shards import read_layer, read_written_layer
from vllm_gac.checkpoint.open import Checkpoint, TensorReader
from vllm_gac.compression.devices import home_of
from vllm_gac.compression.moments import clip_weights, second_moment, size_limit
from vllm_gac.compression.reference_model import (
    Reference,
    after_mlp,
    attended_values,
    batches,
    cast,
    embed,
    layer_outputs,
    mlp_activations,
    project,
)
from vllm_gac.layout.dims import LayerLayout, ModelLayout
from vllm_gac.texts.token_text import evenly_spread

Weights: TypeAlias = Mapping[str, torch.Tensor]

# Tokens to refit on, at least, and for each channel of an MLP.
_MIN_TOKENS, _FOR_EACH_CHANNEL = 1 << 15, 4
# Ridges, relative to the mean variance of the inputs.
_RIDGES = (1e-3, 1e-2, 1e-1, 1.0)
# One of so many sequences is not fitted on, so there must be as many.
MIN_SEQUENCES = 8
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


class Refitting:
    """The refit of the layers that are made of a dense model.

    Args:
        model: The dense model.
        layout: What it becomes.
        checkpoint: The files of the dense model.
        read: Reads the dense model's tensors.
        tokens: The text to refit on, [count, length].
        directory: Where the compressed layers are written.
    """

    def __init__(
        self,
        model: Reference,
        layout: ModelLayout,
        checkpoint: Checkpoint,
        read: TensorReader,
        tokens: torch.Tensor,
        directory: Path,
    ) -> None:
        self._model, self._layout, self._read, self._directory = model, layout, read, directory
        self._checkpoint = checkpoint
        self._tokens = _some(tokens, model.layout.layers[0].intermediate_size)
        self._held: dict[int, Streams] = {}
        # Those that enter and leave a layer, dense and compressed, and what its last linears get.
        numbers = 6 * layout.hidden_size + model.layout.layers[0].intermediate_size
        states_bytes = 4 * self._tokens.numel() * numbers
        self._home = home_of(states_bytes, model.device)

    def refitted(self, index: int, dense: Weights, small: Weights) -> Weights:
        """The tensors of compressed layer `index`, in the dtypes of `small`."""
        layer = self._layout.layers[index]
        entering, keeps_mlp = self._entering(index), self._checkpoint.kept is not None
        tensors, leaving = refit_layer(self._model, index, dense, layer, small, entering, keeps_mlp)
        self._held = {index + 1: leaving}
        return tensors

    def unchanged(self, index: int, weights: Weights) -> None:
        """Pass the hidden states on through layer `index`, which stays as it is."""
        self._held = {index + 1: self._through(index, weights, weights, self._entering(index))}

    def _entering(self, index: int) -> Streams:
        if index not in self._held:
            self._held = {index: self._streams(index)}
        return self._held[index]

    def _streams(self, index: int) -> Streams:
        hidden = embed(self._model, self._read, self._tokens).to(self._home)
        streams = Streams(hidden, hidden)
        for made in range(index):
            dense = read_layer(self._model.layout, self._read, made, self._model.device.type)
            written = read_written_layer(self._checkpoint, self._directory, self._layout, made)
            streams = self._through(made, dense, written, streams)
        return streams

    def _through(self, index: int, dense: Weights, small: Weights, entering: Streams) -> Streams:
        """The hidden states that leave layer `index`, dense and compressed."""
        before, after = (layout.layers[index] for layout in (self._model.layout, self._layout))
        left = layer_output(self._model, before, dense, entering.dense)
        if before == after and entering.small is entering.dense:
            return Streams(left, left)
        return Streams(left, layer_output(self._model, after, small, entering.small))


def _some(tokens: torch.Tensor, width: int) -> torch.Tensor:
    """Sequences that are spread evenly over the text."""
    wanted = max(_MIN_TOKENS, _FOR_EACH_CHANNEL * width) // tokens.shape[1]
    count = min(len(tokens), max(MIN_SEQUENCES, wanted))
    return tokens[evenly_spread(count, len(tokens))].long()


def refit_layer(
    model: Reference,
    index: int,
    dense: Weights,
    layer: LayerLayout,
    weights: Weights,
    streams: Streams,
    keeps_mlp: bool = False,
) -> tuple[dict[str, torch.Tensor], Streams]:
    """Refit o_proj and down_proj of a compressed layer.

    Args:
        model: The dense model.
        index: The layer's number.
        dense: The dense layer's tensors.
        layer: The compressed layer's dims.
        weights: Its tensors, in the dtypes in which they are stored.
        streams: The hidden states that enter the layer.
        keeps_mlp: Whether the MLP stays as it is, as experts and packed linear layers do.

    Returns:
        The tensors, and the hidden states that leave the layer with them.
    """
    refitted, before, dense = dict(weights), model.layout.layers[index], _cast(model, dense)
    small, home = _cast(model, weights), streams.small.device
    # Kept, so that attention is computed once.
    attended = [
        attended_values(model, layer, small, states).to(home)
        for states in _on_device(model, streams.small)
    ]
    attended_dense = (
        attended_values(model, before, dense, states) for states in _on_device(model, streams.dense)
    )
    wanted = _after_attention(model, dense, streams.dense, attended_dense)
    linear = "self_attn.o_proj"
    refitted |= _refitted(model, linear, refitted, attended, streams.small, wanted)
    small = _cast(model, refitted)
    middle = _after_attention(model, small, streams.small, attended)
    _pass_mlp(model, dense, wanted)
    if keeps_mlp:
        _pass_mlp(model, small, middle)
        return refitted, Streams(wanted, middle)

    def activations() -> Iterator[torch.Tensor]:
        return (mlp_activations(model, small, states) for states in _on_device(model, middle))

    # Kept, too, unless they had to be moved, which takes longer than to compute them.
    kept = [*activations()] if model.device.type == home.type else None
    refitted |= _refitted(model, "mlp.down_proj", refitted, kept or activations(), middle, wanted)
    last = _cast(model, {name: refitted[name] for name in refitted if name.startswith("mlp.down")})
    for states, x in zip(batches(middle), kept or activations(), strict=True):
        states += project(last, "mlp.down_proj", x).to(home)
    return refitted, Streams(wanted, middle)


def _on_device(model: Reference, hidden: torch.Tensor) -> Iterator[torch.Tensor]:
    return (states.to(model.device) for states in batches(hidden))


def _after_attention(
    model: Reference, weights: Weights, entering: torch.Tensor, attended: Iterable[torch.Tensor]
) -> torch.Tensor:
    """The hidden states between attention and the MLP, where those that enter are.

    The inputs of o_proj are `attended`, batch by batch.
    """
    outputs = torch.empty_like(entering)
    for states, x, leaving in zip(
        _on_device(model, entering), attended, batches(outputs), strict=True
    ):
        leaving.copy_(states + project(weights, "self_attn.o_proj", x.to(model.device)))
    return outputs


def _pass_mlp(model: Reference, weights: Weights, hidden: torch.Tensor) -> None:
    """Replace the hidden states between attention and the MLP by those that leave the layer."""
    for states in batches(hidden):
        states.copy_(after_mlp(model, weights, states.to(model.device)))


def layer_output(
    model: Reference, layer: LayerLayout, weights: Weights, hidden: torch.Tensor
) -> torch.Tensor:
    """The states [count, length, hidden] that leave a layer, where those that enter it are."""
    return layer_outputs(model, layer, _cast(model, weights), hidden)


def _cast(model: Reference, weights: Weights) -> dict[str, torch.Tensor]:
    """The tensors on the model's device in its dtype; RoPE tables keep theirs."""
    return {
        name: t.to(model.device) if name.endswith("rope_inv_freq") else cast(model, t)
        for name, t in weights.items()
    }


def _refitted(
    model: Reference,
    linear: str,
    weights: Weights,
    inputs: Iterable[torch.Tensor],
    entering: torch.Tensor,
    wanted: torch.Tensor,
) -> dict[str, torch.Tensor]:
    """The last factor of `linear`, so that `entering` plus its output is near `wanted`.

    Its `inputs` come batch by batch.
    """
    factorized = f"{linear}.B.weight" in weights
    factor = f"{linear}.B.weight" if factorized else f"{linear}.weight"
    small = _cast(model, {n: t for n, t in weights.items() if n.startswith(f"{linear}.")})
    fitted, unseen = (_Moments(small[factor].double()) for _ in range(2))
    number, limits = 0, list[torch.Tensor]()
    for x, states, target in zip(inputs, batches(entering), batches(wanted), strict=True):
        x, states, target = (tensor.to(model.device) for tensor in (x, states, target))
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
        held_out = numbers % MIN_SEQUENCES == MIN_SEQUENCES - 1
        fitted.add(x[~held_out], missing[~held_out])
        unseen.add(x[held_out], missing[held_out])
        number += len(states)
    best, change = -_MIN_GAIN * unseen.energy, None
    for ridge in _RIDGES if unseen.energy else ():
        tried = fitted.solved(ridge)
        if (gain := unseen.increase(tried)) < best:
            best, change = gain, tried
    return {} if change is None else {factor: (small[factor] + change).to(weights[factor])}


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
        """By how much the squared error grows if the weight changes by `change` [out, in]."""
        return float(((change @ self.inner - 2 * self.crossed) * change).sum())

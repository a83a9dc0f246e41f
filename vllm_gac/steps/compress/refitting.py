"""Refit the layers of a compressed model one after another, and go on after an interruption.

A run holds the hidden states that enter the next layer, dense and compressed. After a stop, the
layers that were made run once more, which takes a small part of the time of making them.
"""

from collections.abc import Mapping
from pathlib import Path

import torch

from vllm_gac.checkpoint.layer_shards import read_layer, read_written_layer
from vllm_gac.checkpoint.open import Checkpoint, TensorReader
from vllm_gac.compression.devices import home_of
from vllm_gac.compression.reference_model import Reference, embed
from vllm_gac.compression.refit import Streams, layer_output, refit_layer
from vllm_gac.layout.dims import ModelLayout
from vllm_gac.texts.token_text import evenly_spread

# Tokens to refit on, at least, and for each channel of an MLP.
_MIN_TOKENS, _FOR_EACH_CHANNEL = 1 << 15, 4


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

    def refitted(
        self, index: int, dense: Mapping[str, torch.Tensor], small: Mapping[str, torch.Tensor]
    ) -> Mapping[str, torch.Tensor]:
        """The tensors of compressed layer `index`, in the dtypes of `small`."""
        layer = self._layout.layers[index]
        entering, keeps_mlp = self._entering(index), self._checkpoint.kept is not None
        tensors, leaving = refit_layer(self._model, index, dense, layer, small, entering, keeps_mlp)
        self._held = {index + 1: leaving}
        return tensors

    def unchanged(self, index: int, weights: Mapping[str, torch.Tensor]) -> None:
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

    def _through(
        self,
        index: int,
        dense: Mapping[str, torch.Tensor],
        small: Mapping[str, torch.Tensor],
        entering: Streams,
    ) -> Streams:
        """The hidden states that leave layer `index`, dense and compressed."""
        before, after = (layout.layers[index] for layout in (self._model.layout, self._layout))
        left = layer_output(self._model, before, dense, entering.dense)
        if before == after and entering.small is entering.dense:
            return Streams(left, left)
        return Streams(left, layer_output(self._model, after, small, entering.small))


def _some(tokens: torch.Tensor, width: int) -> torch.Tensor:
    """Sequences that are spread evenly over the text."""
    wanted = max(_MIN_TOKENS, _FOR_EACH_CHANNEL * width) // tokens.shape[1]
    count = min(len(tokens), max(1, wanted))
    return tokens[evenly_spread(count, len(tokens))].long()

"""Refit the layers of a compressed model one after another, and go on after an interruption.

A run holds the hidden states that enter the next layer, dense and compressed. After a stop, the
layers that were made run once more, which takes a small part of the time of making them.
"""

from collections.abc import Mapping
from pathlib import Path

import torch

from vllm_gac.checkpoint.layer_shards import read_layer_for, read_written_layer
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
        # Those that enter and leave a layer, dense and compressed, and those between its halves.
        states_bytes = 6 * 4 * self._tokens.numel() * layout.hidden_size
        self._home = home_of(states_bytes, model.device)

    def refitted(
        self, index: int, dense: Mapping[str, torch.Tensor], small: Mapping[str, torch.Tensor]
    ) -> tuple[Mapping[str, torch.Tensor], torch.Tensor]:
        """The tensors of compressed layer `index`, and what leaves the dense layer."""
        layer = self._layout.layers[index]
        entering, keeps_mlp = self._entering(index), self._checkpoint.kept is not None
        return refit_layer(self._model, index, dense, layer, small, entering, keeps_mlp)

    def unchanged(self, index: int, dense: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """What leaves the dense layer `index`."""
        layer = self._model.layout.layers[index]
        return layer_output(self._model, layer, dense, self._entering(index).dense)

    def keep(self, index: int, stored: Mapping[str, torch.Tensor], dense: torch.Tensor) -> None:
        """Keep what leaves layer `index`, with its tensors as they are `stored`, for the next one.

        `dense` is what leaves the dense layer.
        """
        if index + 1 < len(self._layout.layers):
            layer = self._layout.layers[index]
            small = layer_output(self._model, layer, stored, self._entering(index).small)
            self._held = {index + 1: Streams(dense, small)}

    def _entering(self, index: int) -> Streams:
        if index not in self._held:
            self._held = {index: self._streams(index)}
        return self._held[index]

    def _streams(self, index: int) -> Streams:
        dense = small = embed(self._model, self._read, self._tokens).to(self._home)
        before = self._model.layout
        for made in range(index):
            device = self._model.device.type
            weights = read_layer_for(device, before, self._read, made)
            dense = layer_output(self._model, before.layers[made], weights, dense)
            written = read_written_layer(self._checkpoint, self._directory, self._layout, made)
            small = layer_output(self._model, self._layout.layers[made], written, small)
        return Streams(dense, small)


def _some(tokens: torch.Tensor, width: int) -> torch.Tensor:
    """Sequences that are spread evenly over the text."""
    wanted = max(_MIN_TOKENS, _FOR_EACH_CHANNEL * width) // tokens.shape[1]
    count = min(len(tokens), max(1, wanted))
    return tokens[evenly_spread(count, len(tokens))].long()

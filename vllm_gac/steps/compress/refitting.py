"""Refit the layers of a compressed model one after another, and go on after an interruption.

The hidden states that enter a layer, dense and compressed, are in a file until the next but one is
written, so that a layer can be made again if the run is stopped before its shard is on disk. The
file is read only after a stop: a run that goes on holds what it has written.
"""

from collections.abc import Mapping
from pathlib import Path

import torch

from vllm_gac.checkpoint.atomic_files import write_floats
from vllm_gac.checkpoint.open import TensorReader
from vllm_gac.compression.devices import home_of
from vllm_gac.compression.reference_model import Reference, embed
from vllm_gac.compression.refit import Streams, layer_output, refit_layer
from vllm_gac.layout.dims import ModelLayout
from vllm_gac.runs.kept_tensors import kept_tensors
from vllm_gac.texts.token_text import evenly_spread

# Tokens to refit on, at least, and for each channel of an MLP.
_MIN_TOKENS, _FOR_EACH_CHANNEL = 1 << 15, 4


class Refitting:
    """The refit of the layers that are made of a dense model.

    Args:
        model: The dense model.
        layout: What it becomes.
        read: Reads the dense model's tensors.
        tokens: The text to refit on, [count, length].
        directory: Where the hidden states between layers are kept.
    """

    def __init__(
        self,
        model: Reference,
        layout: ModelLayout,
        read: TensorReader,
        tokens: torch.Tensor,
        directory: Path,
    ) -> None:
        self._model, self._layout, self._read, self._directory = model, layout, read, directory
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
        return refit_layer(self._model, index, dense, layer, small, self._entering(index))

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
            shapes = {"dense": dense.shape, "small": small.shape}
            write_floats(self._path(index + 1), shapes, (dense, small), {})
            self._held = {index + 1: Streams(dense, small)}
        if index:
            self._path(index - 1).unlink(missing_ok=True)

    def _entering(self, index: int) -> Streams:
        if index not in self._held:
            self._held = {index: self._streams(index)}
        return self._held[index]

    def _streams(self, index: int) -> Streams:
        if index:
            shape = (*self._tokens.shape, self._layout.hidden_size)
            kept = kept_tensors(self._path(index), {"dense": shape, "small": shape})
            return Streams(**{name: states.to(self._home) for name, states in kept.items()})
        hidden = embed(self._model, self._read, self._tokens).to(self._home)
        return Streams(hidden, hidden)

    def _path(self, index: int) -> Path:
        return self._directory / f"streams-{index:04}.safetensors"


def _some(tokens: torch.Tensor, width: int) -> torch.Tensor:
    """Sequences that are spread evenly over the text."""
    wanted = max(_MIN_TOKENS, _FOR_EACH_CHANNEL * width) // tokens.shape[1]
    count = min(len(tokens), max(1, wanted))
    return tokens[evenly_spread(count, len(tokens))].long()

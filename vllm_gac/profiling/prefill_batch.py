"""A prefill chunk on the GPU, computed by the code that serves it, for any kernel and sizes."""

from collections.abc import Callable
from dataclasses import replace

import torch

from vllm_gac.kernels.torch_reference import write_cache
from vllm_gac.layout.cache_geometry import CacheGeometry
from vllm_gac.layout.rounding import ceil_div
from vllm_gac.serving.attention.prefill import PrefillLayer, prefill_attention, prefill_batch

_DEVICE = torch.device("cuda")
_BLOCK_SIZE = 16  # tokens of a page


class PrefillChunk:
    """Whole prompts of one length, with random bfloat16 elements and pages in random order."""

    def __init__(self, geometry: CacheGeometry, sequences: int, length: int) -> None:
        g = self.geometry = geometry
        tokens, blocks = sequences * length, ceil_div(length, _BLOCK_SIZE)
        table = torch.randperm(sequences * blocks, device=_DEVICE).int().view(sequences, blocks)
        # Heads first in memory, as gac models are served.
        self.cache = _random(
            sequences * blocks, g.value_heads, _BLOCK_SIZE, g.key_width + g.value_size
        )
        self.query = _random(tokens, g.query_heads, g.query_size)
        # As the projections return them: keys in their own tensor, values beside the queries.
        self.key = _random(tokens, g.value_heads, g.key_width)
        packed = _random(tokens, g.query_heads * g.query_size + g.value_heads * g.value_size)
        values = packed[:, -g.value_heads * g.value_size :]
        self.value = values.view(tokens, g.value_heads, g.value_size)
        position = torch.arange(length, device=_DEVICE)
        block = table[:, position // _BLOCK_SIZE].long()
        slots = (block * _BLOCK_SIZE + position % _BLOCK_SIZE).flatten()
        write_cache(self.key, self.value, self.cache, slots)
        self.output = _random(tokens, g.query_heads, g.value_size)
        lengths = torch.full((sequences,), length)
        self.batch = prefill_batch(
            torch.arange(sequences + 1) * length, lengths, lengths.int().to(_DEVICE), table
        )

    def attention(self, kernel: str, *, cached: bool) -> Callable[[], None]:
        """A function that runs `kernel` on the step's own keys and values, or on cached ones."""
        batch = replace(self.batch, has_past=cached)
        layer = PrefillLayer(
            self.geometry,
            kernel,
            torch.cuda.get_device_capability(),
            self.geometry.key_size**-0.5,
        )

        def call() -> None:
            prefill_attention(
                layer, self.query, self.key, self.value, self.cache, batch, self.output
            )

        return call


def _random(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device=_DEVICE).normal_()

"""A prefill chunk on the GPU, computed by the code that serves it, for any kernel and sizes."""

from collections.abc import Callable
from dataclasses import replace

import torch

from vllm_gac.kernels.torch_reference import LatentKeys, paged_attention, write_cache
from vllm_gac.layout.cache_geometry import CacheGeometry
from vllm_gac.layout.rounding import ceil_div
from vllm_gac.serving.attention.prefill import PrefillLayer, prefill_attention, prefill_batch

_DEVICE = torch.device("cuda")


class PrefillChunk:
    """Whole prompts of one length, with random bfloat16 numbers and pages in random order.

    With `head_dim`, keys are latent: they are rebuilt to `kv_heads` heads of that size, by default
    one per latent key head.
    """

    def __init__(
        self,
        geometry: CacheGeometry,
        sequences: int,
        length: int,
        *,
        block_size: int = 16,
        head_dim: int | None = None,
        kv_heads: int | None = None,
    ) -> None:
        g = self.geometry = geometry
        self.sequences, self.length = sequences, length
        self.scale = (head_dim or g.key_size) ** -0.5
        tokens, blocks = sequences * length, ceil_div(length, block_size)
        table = torch.randperm(sequences * blocks, device=_DEVICE).int()
        self.table = table.view(sequences, blocks)
        # Heads first in memory, as gac models are served.
        self.cache = _random(
            sequences * blocks, g.value_heads, block_size, g.key_width + g.value_size
        )
        self.query = _random(tokens, g.query_heads, g.query_size)
        # As the projections return them: keys in their own tensor, values beside the queries.
        self.key = _random(tokens, g.value_heads, g.key_width)
        packed = _random(tokens, g.query_heads * g.query_size + g.value_heads * g.value_size)
        values = packed[:, -g.value_heads * g.value_size :]
        self.value = values.view(tokens, g.value_heads, g.value_size)
        position = torch.arange(length, device=_DEVICE)
        block = self.table[:, position // block_size].long()
        write_cache(
            self.key, self.value, self.cache, (block * block_size + position % block_size).flatten()
        )
        self.output = _random(tokens, g.query_heads, g.value_size)
        lengths = torch.full((sequences,), length)
        self.batch = prefill_batch(
            torch.arange(sequences + 1) * length, lengths, lengths.int().to(_DEVICE), self.table
        )
        shared = (kv_heads or g.key_heads) // g.key_heads
        self.latent = _latent(g, head_dim, shared) if head_dim else None

    @property
    def flops(self) -> int:
        """FLOP of the two products under the causal mask, without padding."""
        g = self.geometry
        pairs = self.sequences * self.length * (self.length + 1) // 2
        return 2 * pairs * g.query_heads * (g.query_size + g.value_size)

    def attention(self, kernel: str, *, cached: bool) -> Callable[[], None]:
        """A function that runs `kernel` on the step's own keys and values, or on cached ones."""
        batch = replace(self.batch, has_past=cached)
        layer = PrefillLayer(
            self.geometry,
            kernel,
            torch.cuda.get_device_capability(),
            self.scale,
            latent=self.latent,
        )

        def call() -> None:
            prefill_attention(
                layer, self.query, self.key, self.value, self.cache, batch, self.output
            )

        return call

    def error(self) -> float:
        """Relative error of `output` on the first sequence, against fp32."""
        found = self.output[: self.length]
        expected = torch.empty(found.shape, device=_DEVICE)
        paged_attention(
            self.query[: self.length],
            self.cache,
            self.table[:1],
            [0, self.length],
            [self.length],
            self.geometry,
            self.scale,
            expected,
            latent=self.latent,
        )
        return float((found.float() - expected).norm() / expected.norm())


def _random(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device=_DEVICE).normal_()


def _latent(geometry: CacheGeometry, head_dim: int, shared: int) -> LatentKeys:
    up = _random(geometry.key_heads, shared * head_dim, geometry.key_size)
    exponents = torch.arange(0, head_dim, 2, device=_DEVICE) / head_dim
    return LatentKeys(up * geometry.key_size**-0.5, (5e5**-exponents)[None].contiguous())

"""What our attention implementations have in common: a layer whose cache rows are packed."""

from typing import TypeVar

import torch
from vllm.model_executor.layers.attention import Attention
from vllm.platforms import current_platform
from vllm.utils.torch_utils import is_quantized_kv_cache
from vllm.v1.attention.backend import AttentionImpl, AttentionType

from vllm_gac.kernels.torch_reference import LatentKeys
from vllm_gac.layout.cache_geometry import CacheGeometry

Metadata = TypeVar("Metadata")


class PackedImpl(AttentionImpl[Metadata]):
    """Takes vLLM's arguments, and how this layer's rows are packed (`geometry`, `latent`).

    `prefill` is the layer's prefill kernel, of select.PREFILL_KERNELS; the reference has none.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        *,
        geometry: CacheGeometry,
        latent: LatentKeys | None = None,
        prefill: str | None = None,
    ) -> None:
        self.num_heads, self.head_size, self.num_kv_heads = num_heads, head_size, num_kv_heads
        self.scale = scale
        self.window = sliding_window
        self.kv_cache_dtype = kv_cache_dtype
        self.geometry = geometry
        self.latent = latent
        self.prefill = prefill

    def cached_dtype(self, layer: Attention) -> torch.dtype:
        """Of the numbers that kernels find in the cache of `layer`, which this implements."""
        if is_quantized_kv_cache(self.kv_cache_dtype):
            return current_platform.fp8_dtype()
        return layer.kv_cache_torch_dtype

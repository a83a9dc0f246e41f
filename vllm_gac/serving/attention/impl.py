"""What our two attention backends share: layers whose cache rows are packed."""

from typing import TypeVar

import torch
from vllm.model_executor.layers.attention import Attention
from vllm.platforms import current_platform
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionType
from vllm.v1.kv_cache_interface import is_quantized_kv_cache

from vllm_gac.errors import GacError
from vllm_gac.kernels.torch_reference import LatentKeys
from vllm_gac.layout.cache_geometry import CacheGeometry

Metadata = TypeVar("Metadata")


class PackedBackend(AttentionBackend):
    """What both backends answer vLLM alike."""

    forward_includes_kv_cache_update: bool = False

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True


class PackedImpl(AttentionImpl[Metadata]):
    """An AttentionImpl that also knows how its layer's cache rows are packed.

    Args:
        geometry: Heads of this rank and how their rows are packed. By default, as many values as
            keys, all of one size, as vLLM's own layers have them.
        latent: The factors that rebuild latent keys; None for rotary keys.
        prefill: The layer's prefill kernel, one of `gpu.attention_choice.PREFILL_KERNELS`. The
            reference backend does not use it.

    The other arguments are vLLM's. No layer of ours sets those that would change what is computed
    in another way; layers of vLLM's own models may.

    Raises:
        GacError: One of them is set.
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
        geometry: CacheGeometry | None = None,
        latent: LatentKeys | None = None,
        prefill: str | None = None,
        **others: object,
    ) -> None:
        changes = {
            "ALiBi slopes": alibi_slopes,
            "a soft cap": logits_soft_cap,
            "a cache shared between layers": kv_sharing_target_layer_name,
            **others,
        }
        unsupported = [name for name, change in changes.items() if change is not None]
        if attn_type != AttentionType.DECODER:
            unsupported.insert(0, f"attention of type {attn_type}")
        if unsupported:
            raise GacError(
                f"--attention-backend GAC: the model has {', '.join(unsupported)}, and only plain "
                "causal attention of a decoder is implemented; leave it out"
            )
        self.num_heads, self.head_size, self.num_kv_heads = num_heads, head_size, num_kv_heads
        self.scale = scale
        self.window = sliding_window
        self.kv_cache_dtype = kv_cache_dtype
        self.geometry = geometry or CacheGeometry(
            query_heads=num_heads,
            query_size=head_size,
            key_heads=num_kv_heads,
            key_size=head_size,
            value_heads=num_kv_heads,
            value_size=head_size,
        )
        self.latent = latent
        self.prefill = prefill

    def cached_dtype(self, layer: Attention) -> torch.dtype:
        """The dtype that kernels read from the cache of `layer`, which this object implements."""
        if is_quantized_kv_cache(self.kv_cache_dtype):
            return current_platform.fp8_dtype()
        return layer.kv_cache_torch_dtype

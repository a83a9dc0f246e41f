"""Attention backend GAC_TRITON: layers with r_k != r_v on vLLM's Triton diffkv kernel.

vLLM's own TRITON_ATTN_DIFFKV keeps r_v in a class attribute that all layers share, so it cannot
serve layers of different r_v; here each layer and each metadata builder has its own.
"""

import torch
from vllm.config import VllmConfig
from vllm.utils.math_utils import next_power_of_2
from vllm.utils.torch_utils import is_quantized_kv_cache
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionMetadata,
    TritonAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.triton_attn_diffkv import (
    TritonAttentionDiffKVBackend,
    TritonAttentionDiffKVImpl,
)
from vllm.v1.attention.ops.triton_unified_attention_diffkv import unified_attention_diffkv
from vllm.v1.kv_cache_interface import AttentionSpec

from vllm_gac.kernels.reference import CacheGeometry


class GacTritonBuilder(TritonAttentionMetadataBuilder):
    """Triton's builder with the scratch of partial outputs as wide as this group's values."""

    softmax_segm_output: torch.Tensor  # fp32 [tokens, query heads, segments, width]

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        *segments, _ = self.softmax_segm_output.shape
        width = next_power_of_2(kv_cache_spec.head_size_v)
        self.softmax_segm_output = torch.empty(
            (*segments, width), dtype=torch.float32, device=device
        )


class GacTritonImpl(TritonAttentionDiffKVImpl):
    """vLLM's diffkv attention with this layer's own value size."""

    def __init__(self, *args: object, geometry: CacheGeometry, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.geometry = geometry

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: TritonAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if attn_metadata is None:  # profiling run: no cache yet
            return output.fill_(0)
        tokens = attn_metadata.num_actual_tokens
        cache = kv_cache.transpose(1, 2)  # the kernel reads [block, token, head, row]
        quantized = is_quantized_kv_cache(self.kv_cache_dtype)
        if quantized:
            cache = cache.view(self.fp8_dtype)
        unified_attention_diffkv(
            q=query[:tokens],
            k=cache[..., : self.geometry.key_width],
            v=cache[..., self.geometry.key_width :],
            out=output[:tokens],
            cu_seqlens_q=attn_metadata.query_start_loc,
            seqused_k=attn_metadata.seq_lens,
            softmax_scale=self.scale,
            causal=True,
            window_size=self.sliding_window,
            block_table=attn_metadata.block_table,
            softcap=self.logits_soft_cap,
            max_seqlen_q=attn_metadata.max_query_len,
            k_descale=layer._k_scale if quantized else None,
            v_descale=layer._v_scale if quantized else None,
            seq_threshold_3D=attn_metadata.seq_threshold_3D,
            num_par_softmax_segments=attn_metadata.num_par_softmax_segments,
            softmax_segm_output=attn_metadata.softmax_segm_output,
            softmax_segm_max=attn_metadata.softmax_segm_max,
            softmax_segm_expsum=attn_metadata.softmax_segm_expsum,
        )
        return output


class GacTritonBackend(TritonAttentionDiffKVBackend):
    """The backend as vLLM sees it."""

    @staticmethod
    def get_name() -> str:
        return "GAC_TRITON"

    @staticmethod
    def get_impl_cls() -> type[GacTritonImpl]:
        return GacTritonImpl

    @staticmethod
    def get_builder_cls() -> type[GacTritonBuilder]:
        return GacTritonBuilder

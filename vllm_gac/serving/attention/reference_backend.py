"""Attention backend GAC_REFERENCE: serves every layout in plain torch. Correct, but slow."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.kv_cache_interface import KVCacheLayout, KVCacheSpec

from vllm_gac.errors import GacError
from vllm_gac.kernels.torch_reference import paged_attention, write_cache
from vllm_gac.serving.attention.impl import PackedBackend, PackedImpl


@dataclass
class GacReferenceMetadata:
    """What the reference needs to know about a batch. It loops over the lengths on the host."""

    query_starts: list[int]
    context_lengths: list[int]
    block_table: torch.Tensor


class GacReferenceBuilder(AttentionMetadataBuilder[GacReferenceMetadata]):
    """Builds the metadata of each step. Loops over sequences cannot be captured in CUDA graphs."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER

    def __init__(
        self,
        kv_cache_spec: KVCacheSpec,
        layer_names: list[str],
        vllm_config: object,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> GacReferenceMetadata:
        common = common_attn_metadata
        return GacReferenceMetadata(
            query_starts=common.query_start_loc_cpu[: common.num_reqs + 1].tolist(),
            context_lengths=common.seq_lens[: common.num_reqs].tolist(),
            block_table=common.block_table_tensor,
        )


# The other dtypes are packed or scaled, which the reference does not implement.
_KV_CACHE_DTYPES = ("auto", "float16", "bfloat16")


class GacReferenceImpl(PackedImpl[GacReferenceMetadata]):
    """Attention of one layer over its packed cache. Raises GacError for a quantized cache."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.kv_cache_dtype not in _KV_CACHE_DTYPES:
            raise GacError(
                f"--kv-cache-dtype {self.kv_cache_dtype}: the layers of this model that vLLM's CPU "
                "attention does not serve need a cache of the model's dtype; leave the flag out; "
                "if config.json asks for this one, give bfloat16"
            )

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        write_cache(key, value, kv_cache, slot_mapping)

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: GacReferenceMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if attn_metadata is None:  # profiling run without a cache
            return output.fill_(0)
        paged_attention(
            query,
            kv_cache,
            attn_metadata.block_table,
            attn_metadata.query_starts,
            attn_metadata.context_lengths,
            self.geometry,
            self.scale,
            output,
            self.window,
            self.latent,
        )
        return output


class GacReferenceBackend(PackedBackend):
    """The backend as vLLM sees it."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]

    @staticmethod
    def get_name() -> str:
        return "GAC_REFERENCE"

    @staticmethod
    def get_impl_cls() -> type[GacReferenceImpl]:
        return GacReferenceImpl

    @staticmethod
    def get_builder_cls() -> type[GacReferenceBuilder]:
        return GacReferenceBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(
        kv_cache_spec: KVCacheSpec | None = None,
    ) -> list[int | MultipleOf]:
        return [MultipleOf(1)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """The layouts of vLLM's CPU backend.

        All pipeline stages must name the same ones, and one stage may have only layers of our
        backend while another has layers of vLLM's.
        """
        return CPUAttentionBackend.supported_kv_cache_layouts()

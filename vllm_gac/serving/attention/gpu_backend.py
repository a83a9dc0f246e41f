"""Attention backend GAC: serves any layout on a CUDA GPU, and decodes in full CUDA graphs.

Decoding requests come first in a batch and run on our decode kernel, the others on a prefill kernel
or, in small steps, on the decode kernel, too (attention/step.py). vLLM makes a builder for every
class of heads; they share the batch and the scratch.
"""

import functools
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from triton import next_power_of_2
from vllm.config import VllmConfig, get_current_vllm_config, get_layers_from_vllm_config
from vllm.config.cache import CacheDType
from vllm.model_executor.layers.attention import Attention
from vllm.platforms import current_platform
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MultipleOf,
    max_decode_query_len,
)
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec, is_quantized_kv_cache

from vllm_gac.errors import GacError
from vllm_gac.kernels.cache_write import CacheTarget, write_cache
from vllm_gac.kernels.decode.launch import (
    DecodeScratch,
    decode_attention,
    decode_scratch,
    larger_scratch,
    takes,
)
from vllm_gac.serving.attention.impl import PackedBackend, PackedImpl
from vllm_gac.serving.attention.layer import announce, attention_kernels
from vllm_gac.serving.attention.prefill import PrefillLayer, prefill_attention
from vllm_gac.serving.attention.prefill_kernels import in_place_kernel, installed_gpu
from vllm_gac.serving.attention.prefill_memory import (
    max_gathered_tokens,
    prefill_bytes,
    prefill_layers,
)
from vllm_gac.serving.attention.step import StepBatch, StepLimits, build_step, step_of
from vllm_gac.serving.attention.warmup import compile_prefill_kernels, compiling_decode_kernels
from vllm_gac.serving.config.engine_options import (
    DTYPES,
    KV_CACHE_DTYPES,
    MAX_DECODE_QUERY,
    check_gac_on_dense,
)

# Rows of a piece of a prompt (attention/step.py), query heads of a value head x tokens, and that x
# numbers of a value: with more, the decode kernels spill thousands of registers. Kernels round rows
# up to a power of two. Latent keys take registers, too.
_PIECE_ROWS, _LATENT_PIECE_ROWS, _PIECE_VALUES = 64, 32, 64 * 128
# Value heads x cached tokens that a small step attends to: some 30 us of an H200 for a layer, which
# the host spends on the launches of prefill anyway.
_PIECE_KEYS = 1 << 18


@dataclass(frozen=True, slots=True)
class GacMetadata:
    """The metadata that the layers of one class of heads receive in one step."""

    step: StepBatch
    scratch: DecodeScratch


class GacBuilder(AttentionMetadataBuilder[GacMetadata]):
    """Builds the metadata of each step."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    reorder_batch_threshold: int | None

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layers = get_layers_from_vllm_config(vllm_config, Attention, layer_names)
        for name, layer in layers.items():
            _check_sizes(name, layer)
        self.limits = step_limits(vllm_config, device)
        self.reorder_batch_threshold = self.limits.decode_query
        self.scratch = _shared_scratch(vllm_config, device)
        block_size = kv_cache_spec.block_size
        with compiling_decode_kernels(vllm_config, block_size, self.limits, device):
            compile_prefill_kernels(vllm_config, block_size, device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> GacMetadata:
        step = step_of(common_attn_metadata, self.limits)
        return GacMetadata(step, self.scratch)

    def build_for_drafting(
        self, common_attn_metadata: CommonAttentionMetadata, draft_index: int
    ) -> GacMetadata:
        """Build anew each time: a speculator changes its batch in place from draft to draft."""
        step = build_step(common_attn_metadata, self.limits)
        return GacMetadata(step, self.scratch)


def step_limits(vllm_config: VllmConfig, device: torch.device) -> StepLimits:
    """What all layers of our backend have in common.

    Steps with speculative decoding, which have more than one query token of a request that decodes,
    have no pieces: lengths on the host are not exact then.
    """
    decode_query = min(max_decode_query_len(vllm_config), MAX_DECODE_QUERY)
    layers = list(prefill_layers(vllm_config))
    gathered = max_gathered_tokens(vllm_config, device)
    piece, most_heads = MAX_DECODE_QUERY, 1
    for _, prefill in layers:
        heads = prefill.geometry
        rows = _PIECE_ROWS if prefill.latent is None else _LATENT_PIECE_ROWS
        rows = min(rows, next_power_of_2(_PIECE_VALUES // heads.value_size + 1) // 2)
        piece = min(piece, rows * heads.value_heads // heads.query_heads)
        most_heads = max(most_heads, heads.value_heads)
    fits = all(
        takes(p.geometry, piece, layer.impl.cached_dtype(layer).itemsize, p.latent, device)
        for layer, p in layers
    )
    if decode_query > 1 or piece < 2 or not fits:
        return StepLimits(decode_query, gathered)
    return StepLimits(decode_query, gathered, piece, _PIECE_KEYS // most_heads)


def _shared_scratch(vllm_config: VllmConfig, device: torch.device) -> DecodeScratch:
    """Scratch for every layer: they run one after the other.

    The first layer keeps it, because builders do not know each other.
    """
    impls = [layer.impl for layer, _ in prefill_layers(vllm_config)]
    if impls[0].scratch is None:
        limits = step_limits(vllm_config, device)
        kinds = {(impl.geometry, impl.latent is None): impl for impl in impls}
        each = (
            decode_scratch(impl.geometry, queries, device, impl.latent)
            for impl in kinds.values()
            for queries in {limits.decode_query, limits.piece or 1}
        )
        impls[0].scratch = functools.reduce(larger_scratch, each)
    scratch: DecodeScratch = impls[0].scratch
    return scratch


def _check_sizes(name: str, layer: Attention) -> None:
    """Raise GacError unless rows are as wide as the layer's implementation was told.

    vLLM does not tell it the size of values.
    """
    geometry = layer.impl.geometry
    sizes = layer.head_size, layer.head_size_v
    if sizes != (geometry.key_width, geometry.value_size):
        raise GacError(
            f"{name}: caches keys of {sizes[0]} and values of {sizes[1]} numbers; "
            "--attention-backend GAC serves equal sizes only, so leave it out"
        )


class GacImpl(PackedImpl[GacMetadata]):
    """Attention of one layer over its packed cache."""

    scratch: DecodeScratch | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.vllm_config = get_current_vllm_config()
        if self.prefill is None:  # a layer of vLLM's own, whose model names this backend
            check_gac_on_dense(self.vllm_config)
            kernels = attention_kernels(self.geometry, gac_only=True)
            announce(self.geometry, kernels)
            self.prefill = kernels.prefill
        gpu = installed_gpu()
        layer = PrefillLayer(
            geometry=self.geometry,
            kernel=self.prefill,
            capability=gpu.capability,
            scale=self.scale,
            window=self.window,
            latent=self.latent,
        )
        in_place = in_place_kernel(layer.kernel, layer.sizes, gpu) if layer.is_plain else None
        self.prefill_layer = replace(layer, in_place=in_place)

    @property
    def quantized(self) -> bool:
        """Whether the cache is fp8."""
        return is_quantized_kv_cache(self.kv_cache_dtype)

    def cache_target(
        self, layer: torch.nn.Module, kv_cache: torch.Tensor, slots: torch.Tensor
    ) -> CacheTarget:
        """Where and how to cache this step's keys and values.

        `layer`, which this object implements, holds the fp8 scales. `kv_cache` is its cache,
        [blocks, value heads, block_size, row]; `slots` are those of the tokens, int64 [tokens].
        """
        kv_cache, k_scale, v_scale = self._cache_and_scales(layer, kv_cache)
        return CacheTarget(kv_cache, slots, k_scale, v_scale)

    def _cache_and_scales(
        self, layer: torch.nn.Module, kv_cache: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """The cache viewed in its real dtype, and the scales of keys and values if it is fp8."""
        if not self.quantized:
            return kv_cache, None, None
        kv_cache = kv_cache.view(current_platform.fp8_dtype())
        return kv_cache, layer.get_buffer("_k_scale"), layer.get_buffer("_v_scale")

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        write_cache(key, value, self.cache_target(layer, kv_cache, slot_mapping))

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: GacMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if attn_metadata is None:
            if not kv_cache.numel():  # the run in which vLLM measures a step's memory
                self._reserve(query)
            return output.fill_(0)
        decode, prefills = attn_metadata.step.decode, attn_metadata.step.prefills
        kv_cache, k_scale, v_scale = self._cache_and_scales(layer, kv_cache)
        if decode.tokens:
            decode_attention(
                query[: decode.tokens],
                kv_cache,
                decode.block_table,
                decode.query_starts,
                decode.lengths,
                self.geometry,
                self.scale,
                output[: decode.tokens],
                attn_metadata.scratch,
                max_query_len=decode.max_query,
                window=self.window,
                latent=self.latent,
                k_scale=k_scale,
                v_scale=v_scale,
                kernel_sequences=decode.kernel_sequences,
            )
        for rows, prefill in prefills:
            prefill_attention(
                self.prefill_layer,
                query[rows],
                key[rows],
                value[rows],
                kv_cache,
                prefill,
                output[rows],
                k_scale,
                v_scale,
            )
        return output

    def _reserve(self, query: torch.Tensor) -> None:
        """Allocate what decoding keeps, and for a moment the most that prefill takes.

        Builders are made after vLLM has measured.
        """
        _shared_scratch(self.vllm_config, query.device)
        gathered = max_gathered_tokens(self.vllm_config, query.device)
        size = prefill_bytes(
            self.prefill_layer, query.shape[0], gathered, self.quantized, query.dtype
        )
        torch.empty(size, dtype=torch.uint8, device=query.device)


class GacBackend(PackedBackend):
    """The backend as vLLM sees it."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [*DTYPES]
    supported_kv_cache_dtypes: ClassVar[list[CacheDType]] = [*KV_CACHE_DTYPES]

    @staticmethod
    def get_name() -> str:
        return "GAC"

    @staticmethod
    def get_impl_cls() -> type[GacImpl]:
        return GacImpl

    @staticmethod
    def get_builder_cls() -> type[GacBuilder]:
        return GacBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(
        kv_cache_spec: KVCacheSpec | None = None,
    ) -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        return True

"""Compiles the prefill kernels of a model when vLLM makes its first metadata builder.

Otherwise the first prompt would wait for them. FlashAttention 4 takes two seconds for each pair of
head sizes, once: the compiled kernels are kept on disk.
"""

import os
import time
from dataclasses import replace
from pathlib import Path

import torch
from vllm import envs
from vllm.config import VllmConfig
from vllm.logger import init_logger

from vllm_gac.serving.attention.prefill import PrefillLayer, prefill_attention, prefill_batch
from vllm_gac.serving.attention.prefill_memory import prefill_layers
from vllm_gac.serving.config.cache_layout import zero_pages

logger = init_logger(f"vllm.{__name__}")  # vLLM configures loggers below its own

_TOKENS = 16  # length of the prompt to compile with
_compiled: set[object] = set()


def compile_prefill_kernels(vllm_config: VllmConfig, block_size: int, device: torch.device) -> None:
    """Prefill a short prompt, and a later chunk of one, with every class of our layers.

    The model's other builders then find everything compiled.
    """
    # Beside vLLM's other compiled kernels. By default FlashAttention 4 keeps none on disk.
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    directory = Path(envs.VLLM_CACHE_ROOT) / "flash_attention_4"
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(directory))
    start, before = time.perf_counter(), len(_compiled)
    layout = vllm_config.cache_config.get_resolved_kv_cache_layout()
    for layer, prefill in prefill_layers(vllm_config):
        dtype, cache_dtype = vllm_config.model_config.dtype, layer.impl.cached_dtype(layer)
        up = None if prefill.latent is None else prefill.latent.up.shape
        scale = torch.ones_like(layer.get_buffer("_k_scale"))
        heads = prefill.geometry, prefill.kernel, prefill.in_place, prefill.window, up
        kind = heads, dtype, cache_dtype, scale.shape, block_size, layout, device
        if kind not in _compiled:
            _compiled.add(kind)
            geometry = prefill.geometry
            row = geometry.key_width + geometry.value_size
            shape = (1, geometry.value_heads, block_size, row)
            cache = zero_pages(layout, shape, cache_dtype, device)
            _run(prefill, dtype, cache, scale)
            if prefill.in_place is not None:
                _run(replace(prefill, in_place=None), dtype, cache, scale)
    seconds = time.perf_counter() - start
    if seconds > 1:
        logger.info(
            "Compiled the prefill kernels of %d shapes in %.1f s", len(_compiled) - before, seconds
        )


def _run(layer: PrefillLayer, dtype: torch.dtype, cache: torch.Tensor, scale: torch.Tensor) -> None:
    """Prefill with `layer` on `cache`, which has one page: without a past, then with one."""
    geometry, device, block_size = layer.geometry, cache.device, cache.shape[2]

    def zeros(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    scales = (scale, scale) if cache.itemsize == 1 else (None, None)
    for past in (0, block_size - _TOKENS // 2):
        tokens = _TOKENS if not past else _TOKENS // 2
        lengths = torch.tensor([past + tokens])
        batch = prefill_batch(
            torch.tensor([0, tokens]),
            lengths,
            lengths.int().to(device),
            zeros(1, 1, dtype=torch.int32),
        )
        prefill_attention(
            layer,
            zeros(tokens, geometry.query_heads, geometry.query_size),
            zeros(tokens, geometry.value_heads, geometry.key_width),
            zeros(tokens, geometry.value_heads, geometry.value_size),
            cache,
            batch,
            zeros(tokens, geometry.query_heads, geometry.value_size),
            *scales,
        )

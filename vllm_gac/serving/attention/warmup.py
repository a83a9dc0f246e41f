"""Compiles the attention kernels of a whole model when vLLM makes its first metadata builder.

Otherwise the first prompt would wait for them. The model's other builders then find everything
compiled. FlashAttention 4 takes two seconds for each pair of head sizes, once: its kernels are kept
on disk.
"""

import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from vllm import envs
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention

from vllm_gac.kernels.cache_write import is_by_head
from vllm_gac.kernels.decode.warmup import DecodeKind, warmup
from vllm_gac.kernels.gpu_limits import is_hopper
from vllm_gac.layout.families import ARCHITECTURE
from vllm_gac.serving.attention.impl import PackedImpl
from vllm_gac.serving.attention.prefill import PrefillLayer, prefill_attention, prefill_batch
from vllm_gac.serving.attention.prefill_memory import prefill_layers
from vllm_gac.serving.attention.step import MAX_PIECES, StepLimits
from vllm_gac.serving.config.cache_layout import zero_pages
from vllm_gac.serving.gac_config import GacConfig

logger = init_logger(f"vllm.{__name__}")  # vLLM configures loggers below its own

_TOKENS = 16  # length of the prompt to compile with
_compiled: set[object] = set()


@contextmanager
def compiling_decode_kernels(
    vllm_config: VllmConfig, block_size: int, limits: StepLimits, device: torch.device
) -> Iterator[None]:
    """Compile the decode kernels in a thread while the body of the `with` block runs.

    This covers every layer of our backend and every batch that the scheduler may make. All layers
    are registered in `vllm_config`, and compiled at once, so that no core waits. The kind of
    `device` also decides whether MLP kernels are compiled.
    """
    kinds = _kinds(vllm_config, block_size, limits.decode_query)
    if limits.piece:
        kinds += [
            replace(kind, max_query_len=limits.piece, kernel_sequences=MAX_PIECES) for kind in kinds
        ]
    mlps = _mlps(vllm_config) if is_hopper(device) else set()
    max_sequences = vllm_config.scheduler_config.max_num_seqs
    with ThreadPoolExecutor(1) as thread:
        compiled = thread.submit(_compile, kinds, max_sequences, device, mlps)
        yield
        compiled.result()


def _compile(
    kinds: list[DecodeKind],
    max_sequences: int,
    device: torch.device,
    mlps: set[tuple[int, torch.dtype]],
) -> None:
    start = time.perf_counter()
    if device.type == "cuda":
        torch.cuda.set_device(device)  # each thread has its own current device
    warmup(kinds, max_sequences, device, mlps)
    _log("decode", len(kinds), start)


def _kinds(vllm_config: VllmConfig, block_size: int, max_query_len: int) -> list[DecodeKind]:
    """One kind for each set of layers that share their decode kernels."""
    kinds: dict[object, DecodeKind] = {}
    for layer in get_layers_from_vllm_config(vllm_config, Attention).values():
        impl = layer.impl
        if not isinstance(impl, PackedImpl):
            continue
        cache_dtype = impl.cached_dtype(layer)
        up_shape = None if impl.latent is None else impl.latent.up.shape
        by_head = is_by_head(layer.get_buffer("_k_scale"))
        kinds[impl.geometry, up_shape, impl.window, cache_dtype, by_head] = DecodeKind(
            geometry=impl.geometry,
            dtype=vllm_config.model_config.dtype,
            cache_dtype=cache_dtype,
            block_size=block_size,
            max_query_len=max_query_len,
            window=impl.window,
            latent=impl.latent,
            scaled_by_head=by_head,
        )
    return list(kinds.values())


def _mlps(vllm_config: VllmConfig) -> set[tuple[int, torch.dtype]]:
    """Width and dtype of the MLPs that may run on swiglu_linear; width is per rank."""
    model_config = vllm_config.model_config
    if vllm_config.quant_config is not None or vllm_config.lora_config is not None:
        return set()
    # vLLM's own model computes its MLPs. `architecture` stays a dense model's with our layers, too.
    if ARCHITECTURE not in (model_config.hf_config.architectures or []):
        return set()
    ranks = vllm_config.parallel_config.tensor_parallel_size
    layout = GacConfig.of(model_config.hf_config).served
    if layout.experts:  # vLLM's own computes them
        return set()
    return {(layer.intermediate_size // ranks, model_config.dtype) for layer in layout.layers}


def compile_prefill_kernels(vllm_config: VllmConfig, block_size: int, device: torch.device) -> None:
    """Prefill a short prompt, and a later chunk of one, with every class of our layers."""
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
    _log("prefill", len(_compiled) - before, start)


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


def _log(phase: str, shapes: int, start: float) -> None:
    seconds = time.perf_counter() - start
    if seconds > 1:
        logger.info("Compiled the %s kernels of %d shapes in %.1f s", phase, shapes, seconds)

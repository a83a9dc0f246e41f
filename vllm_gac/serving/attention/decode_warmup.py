"""Compiles the decode kernels of a whole model when vLLM makes its first metadata builder."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention

from vllm_gac.kernels.cache_write import is_by_head
from vllm_gac.kernels.decode.warmup import DecodeKind, warmup
from vllm_gac.kernels.gpu_limits import is_hopper
from vllm_gac.layout.families import ARCHITECTURE
from vllm_gac.serving.attention.impl import PackedImpl
from vllm_gac.serving.gac_config import GacConfig

logger = init_logger(f"vllm.{__name__}")  # vLLM configures loggers below its own


@contextmanager
def compiling_decode_kernels(
    vllm_config: VllmConfig, block_size: int, max_query_len: int, device: torch.device
) -> Iterator[None]:
    """Compile the decode kernels in a thread while the body of the `with` block runs.

    This covers every layer of our backend and every batch that the scheduler may make. All layers
    are compiled at once, so that no core waits. The model's other builders then find everything
    compiled.

    Args:
        vllm_config: The engine's config, with all attention layers registered.
        block_size: Tokens in a page of the KV cache.
        max_query_len: Most query tokens of one decoding request, drafted tokens included.
        device: The GPU to compile for; its kind also decides whether MLP kernels are compiled.
    """
    kinds = _kinds(vllm_config, block_size, max_query_len)
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
    seconds = time.perf_counter() - start
    if seconds > 1:
        logger.info("Compiled the decode kernels of %d shapes in %.1f s", len(kinds), seconds)


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
    if model_config.architecture != ARCHITECTURE:  # vLLM's own model computes its MLPs
        return set()
    ranks = vllm_config.parallel_config.tensor_parallel_size
    layout = GacConfig.of(model_config.hf_config).served
    if layout.experts:  # vLLM's own computes them
        return set()
    return {(layer.intermediate_size // ranks, model_config.dtype) for layer in layout.layers}

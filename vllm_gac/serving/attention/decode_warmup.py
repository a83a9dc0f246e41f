"""Compiles what a whole model decodes with when its first metadata builder is made."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention

from vllm_gac.kernels.decode.compile_ahead import DecodeKind, compile_ahead
from vllm_gac.kernels.swiglu import is_hopper
from vllm_gac.serving.attention.impl import PackedImpl
from vllm_gac.serving.hf_layouts import layout_of_hf

logger = init_logger(f"vllm.{__name__}")  # vLLM configures loggers below its own


@contextmanager
def compiling_decode_kernels(
    vllm_config: VllmConfig, block_size: int, max_query_len: int, device: torch.device
) -> Iterator[None]:
    """Meanwhile, compile for every layer of our backend and every batch the scheduler may make.

    All layers at once, so that no core waits; for the model's other builders nothing is left to do.
    """
    kinds = _kinds(vllm_config, block_size, max_query_len)
    mlps = _mlps(vllm_config) if is_hopper(device) else set()
    most = vllm_config.scheduler_config.max_num_seqs
    with ThreadPoolExecutor(1) as thread:
        compiled = thread.submit(_compile, kinds, most, device, mlps)
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
        torch.cuda.set_device(device)  # each thread has its own
    compile_ahead(kinds, max_sequences, device, mlps)
    seconds = time.perf_counter() - start
    if seconds > 1:
        logger.info("Compiled the decode kernels of %d shapes in %.1f s", len(kinds), seconds)


def _kinds(vllm_config: VllmConfig, block_size: int, max_query_len: int) -> list[DecodeKind]:
    kinds: dict[object, DecodeKind] = {}
    for layer in get_layers_from_vllm_config(vllm_config, Attention).values():
        impl = layer.impl
        if not isinstance(impl, PackedImpl):
            continue
        cache_dtype = impl.cached_dtype(layer)
        group = None if impl.latent is None else impl.latent.up.shape
        kinds[impl.geometry, group, impl.window, cache_dtype] = DecodeKind(
            geometry=impl.geometry,
            dtype=vllm_config.model_config.dtype,
            cache_dtype=cache_dtype,
            block_size=block_size,
            max_query_len=max_query_len,
            window=impl.window,
            latent=impl.latent,
        )
    return list(kinds.values())


def _mlps(vllm_config: VllmConfig) -> set[tuple[int, torch.dtype]]:
    """Features and dtype of the MLPs that swiglu_linear may be for."""
    model = vllm_config.model_config
    if vllm_config.quant_config is not None or vllm_config.lora_config is not None:
        return set()
    ranks = vllm_config.parallel_config.tensor_parallel_size
    layers = layout_of_hf(model.hf_config).layers
    return {(layer.intermediate_size // ranks, model.dtype) for layer in layers}

"""Compiles the kernels of decoding steps before they are needed, on all cores at once.

Left to themselves they would be compiled one by one, while CUDA graphs are captured or when the
first request of its kind arrives. Triton's compiler leaves Python's lock alone while it works, so
threads do; and the kernels are then at hand in this process, as if they had been launched.
"""

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from triton.runtime._async_compile import AsyncCompileMode

from vllm_gac.kernels.decode.launch import decode_attention, decode_scratch
from vllm_gac.kernels.decode.schedule import sequence_bound
from vllm_gac.kernels.swiglu import MOST_TOKENS, swiglu_linear
from vllm_gac.kernels.torch_reference import LatentKeys
from vllm_gac.layout.cache_geometry import CacheGeometry


@dataclass(frozen=True, slots=True)
class DecodeKind:
    """Layers that one set of kernels decodes: all that decode_attention is specialized for.

    `dtype` is that of queries and outputs, `cache_dtype` of a cached number; `max_query_len` as
    decode_attention takes it. Of `latent` the shapes count, not the numbers.
    """

    geometry: CacheGeometry
    dtype: torch.dtype
    cache_dtype: torch.dtype
    block_size: int
    max_query_len: int
    window: int | None
    latent: LatentKeys | None


def compile_ahead(
    kinds: Iterable[DecodeKind],
    max_sequences: int,
    device: torch.device,
    mlps: Iterable[tuple[int, torch.dtype]] = (),
) -> None:
    """Compile what decodes batches of 1..max_sequences of each of `kinds`.

    And swiglu_linear for `mlps`, of so many features and such numbers.
    What this process has already is left out, and what is in Triton's cache on disk read from it.
    """
    bounds = sorted({sequence_bound(n + 1) for n in range(max_sequences)})
    # The slowest to compile first, so that no thread is left alone with one.
    slowest_first = sorted(kinds, key=lambda kind: kind.latent is None)
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads, AsyncCompileMode(threads):
        for kind in slowest_first:
            for bound in reversed(bounds):
                _compile(kind, bound, device)
        for features, dtype in mlps:
            weight = torch.empty(2 * features, 8, dtype=dtype, device=device)
            for tokens in (1, MOST_TOKENS):
                swiglu_linear(weight[:tokens], weight, only_compile=True)


def _compile(kind: DecodeKind, sequences: int, device: torch.device) -> None:
    """As a launch would, on tensors that are as small as they may be."""
    geometry = kind.geometry
    row = geometry.key_width + geometry.value_size
    quantized = kind.cache_dtype.itemsize == 1
    scale = torch.ones((), device=device) if quantized else None

    def empty(*shape: int, dtype: torch.dtype = kind.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    decode_attention(
        empty(1, geometry.query_heads, geometry.query_size),
        empty(1, geometry.value_heads, kind.block_size, row, dtype=kind.cache_dtype),
        empty(1, 1, dtype=torch.int32),
        empty(1, dtype=torch.int32),
        empty(sequences, dtype=torch.int32),
        geometry,
        1.0,
        empty(1, geometry.query_heads, geometry.value_size),
        decode_scratch(geometry, kind.max_query_len, device, kind.latent),
        max_query_len=kind.max_query_len,
        window=kind.window,
        latent=kind.latent,
        k_scale=scale,
        v_scale=scale,
        only_compile=True,
    )

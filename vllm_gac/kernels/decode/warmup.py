"""Compiles the kernels of decoding steps before they are needed, on all cores at once.

Otherwise they would be compiled one by one, while CUDA graphs are captured or when the first
request of its kind arrives.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from vllm_gac.kernels.decode.launch import decode_attention, decode_scratch
from vllm_gac.kernels.decode.schedule import sequence_bound
from vllm_gac.kernels.gpu_limits import MAX_SWIGLU_TOKENS
from vllm_gac.kernels.on_all_cores import compiling_on_all_cores
from vllm_gac.kernels.swiglu import swiglu_linear
from vllm_gac.kernels.torch_reference import LatentKeys
from vllm_gac.layout.cache_geometry import CacheGeometry


@dataclass(frozen=True, slots=True)
class DecodeKind:
    """Layers that one set of kernels decodes: everything that decode_attention specializes on.

    `dtype` is that of queries and outputs, `cache_dtype` that of cached elements. `max_query_len`
    and `window` are arguments of decode_attention. Only the shapes of `latent` matter.
    `scaled_by_head` says whether each head of an fp8 cache has a scale of its own.
    `kernel_sequences` is an argument, too; None: batches have any number up to `max_sequences`.
    """

    geometry: CacheGeometry
    dtype: torch.dtype
    cache_dtype: torch.dtype
    block_size: int
    max_query_len: int
    window: int | None
    latent: LatentKeys | None
    scaled_by_head: bool = False
    kernel_sequences: int | None = None


def warmup(
    kinds: Iterable[DecodeKind],
    max_sequences: int,
    device: torch.device,
    mlps: Iterable[tuple[int, torch.dtype]] = (),
) -> None:
    """Compile for `device` what decodes batches of 1..max_sequences of each of `kinds`, and `mlps`.

    These are the features and dtype of every MLP that swiglu_linear computes.
    """
    all_bounds = sorted({sequence_bound(n + 1) for n in range(max_sequences)})
    # The slowest to compile come first, so that no thread is still busy with one at the end.
    slowest_first = sorted(kinds, key=lambda kind: kind.latent is None)
    with compiling_on_all_cores():
        for kind in slowest_first:
            bounds = [kind.kernel_sequences] if kind.kernel_sequences else all_bounds
            for bound in reversed(bounds):
                _compile(kind, bound, device)
        for features, dtype in mlps:
            weight = torch.empty(2 * features, 8, dtype=dtype, device=device)
            for tokens in (1, MAX_SWIGLU_TOKENS):
                swiglu_linear(weight[:tokens], weight, only_compile=True)


def _compile(kind: DecodeKind, sequences: int, device: torch.device) -> None:
    """Compile as a launch would, on tensors that are as small as possible."""
    geometry = kind.geometry
    row = geometry.key_width + geometry.value_size
    quantized = kind.cache_dtype.itemsize == 1
    scales = (geometry.key_heads,) if kind.scaled_by_head else ()
    scale = torch.ones(scales, device=device) if quantized else None

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

"""Our backend behind vLLM's own attention layer, which gives it no geometry, and plain torch."""

from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import CacheConfig, VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.attention.backend import CommonAttentionMetadata

from tests.kernels.decode_cases import random_cache
from tests.kernels.head_scales import row_scales
from vllm_gac.gpu.attention_choice import Kernels
from vllm_gac.kernels.decode.launch import decode_scratch
from vllm_gac.kernels.torch_reference import paged_attention
from vllm_gac.layout.cache_geometry import CacheGeometry
from vllm_gac.serving.attention import gpu_backend
from vllm_gac.serving.plugin import register

HEADS, KV_HEADS, SIZE, BLOCK = 4, 2, 32, 16
# One for all heads, and one for each.
SCALES = [
    (torch.tensor(0.5), torch.tensor(1.5)),
    (torch.tensor([0.2, 2.0]), torch.tensor([3.0, 0.3])),
]
QUERIES, CONTEXTS = [1, 1, 1], [37, 1, 20]


def step(queries: list[int], contexts: list[int], on_host: list[int] | None = None) -> Any:
    """vLLM's description of a batch, decoding requests first; `on_host` bounds `contexts`."""
    starts = torch.tensor([0, *queries]).cumsum(0).int()
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=torch.tensor(contexts, dtype=torch.int32),
        seq_lens_cpu_upper_bound=torch.tensor(on_host or contexts, dtype=torch.int32),
        num_reqs=len(queries),
        num_actual_tokens=sum(queries),
        max_query_len=max(queries),
        max_seq_len=max(contexts),
        block_table_tensor=torch.arange(4 * len(queries), dtype=torch.int32).view(-1, 4),
        slot_mapping=torch.zeros(sum(queries), dtype=torch.int64),
    )


def layer_of(cache_dtype: Any, window: int | None = None) -> Attention:
    """The layer that a model of vLLM's makes, as on a GPU."""
    gpu_backend.__dict__.update(
        check_gac_on_dense=lambda vllm_config: None,
        attention_kernels=lambda heads, gac_only: Kernels("gac", "gac", "FA3", measured=False),
        installed_gpu=lambda: SimpleNamespace(capability=(9, 0), installed=("FA3",)),
    )
    torch.set_default_dtype(torch.float16)
    config = CacheConfig(cache_dtype=cache_dtype)
    with set_current_vllm_config(VllmConfig(cache_config=config)):
        return Attention(
            HEADS,
            SIZE,
            SIZE**-0.5,
            KV_HEADS,
            cache_config=config,
            per_layer_sliding_window=window,
            prefix="model.layers.0.self_attn.attn",
            attn_backend=gpu_backend.GacBackend,
        )


def error_of(layer: Attention, scales: tuple[torch.Tensor, torch.Tensor]) -> float:
    """The error of a step of decoding requests against fp32, relative to the result."""
    generator = torch.Generator().manual_seed(0)
    quantized = layer.impl.quantized
    geometry = CacheGeometry(HEADS, SIZE, KV_HEADS, SIZE, KV_HEADS, SIZE)
    cache, table = random_cache(geometry, CONTEXTS, BLOCK, generator)
    if quantized:
        cache = cache.to(torch.float8_e4m3fn)
        layer._k_scale, layer._v_scale = scales  # as vLLM's loader of either kind leaves them
    else:
        cache = cache.half()
    tokens = sum(QUERIES)
    common = step(QUERIES, CONTEXTS)
    common.block_table_tensor = table
    builder = object.__new__(gpu_backend.GacBuilder)
    scratch = decode_scratch(geometry, 1, torch.device("cpu"))
    vars(builder).update(max_decode_query=1, max_gathered_tokens=0, scratch=scratch)
    query = torch.randn(tokens, HEADS, SIZE, generator=generator)
    output = torch.full_like(query, float("nan"))
    stored = cache.view(torch.uint8) if quantized else cache  # as vLLM does
    unread = torch.empty(tokens, KV_HEADS, SIZE)
    layer.impl.forward(layer, query, unread, unread, stored, builder.build(0, common), output)
    numbers = cache.float()
    if quantized:
        numbers *= row_scales(geometry, *scales)
    expected = torch.zeros(output.shape, dtype=torch.float32)
    starts, window = common.query_start_loc.tolist(), layer.impl.window
    scale = SIZE**-0.5
    paged_attention(query, numbers, table, starts, CONTEXTS, geometry, scale, expected, window)
    return float((output.float() - expected).norm() / expected.norm())


def check(cache_dtype: str, window: int | None, scales: int) -> None:
    """A layer of vLLM's decodes as plain torch, with these of SCALES."""
    register()
    error = error_of(layer_of(cache_dtype, window), SCALES[scales])
    assert error < 5e-3, error

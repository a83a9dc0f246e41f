"""The most memory that prefill takes on a GPU, which vLLM must leave free beside the KV cache.

Gathered rows (kernels/gather_context.py) hold the whole context of a sequence. A context may be
long even if its new tokens are few: 80 requests that share 120,000 tokens would need 22.9 GiB in
one step. So the rows gathered at once take at most 1/128 of the GPU's memory, or one whole context
if that is more. For a model of Llama-3-8B's shape (8 KV heads, bf16) with 131,072 tokens of
context, one context takes 320 MiB with rotary heads of (96, 64), and 512 MiB with latent keys and
values of 128. On a GPU of 141 GB the limits are 640 MiB and 1 GiB.

vLLM measures the memory of a step in a run without attention. In that run every layer allocates
what prefill may take there and frees it again, as vLLM's own MLA does.
"""

from collections.abc import Iterator

import torch
from triton import next_power_of_2
from vllm.config import VllmConfig, get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention

from vllm_gac.gpu.attention_choice import widths
from vllm_gac.kernels.gather_context import row_shape
from vllm_gac.serving.attention.prefill import PrefillLayer
from vllm_gac.serving.attention.prefill_kernels import kernel_bytes

# Gathered rows take at most 1/128 of the GPU's memory, or one context.
_MEMORY_SHARE = 128
# FlashAttention 4 reads pages of 128 tokens or more, but the reservation must not depend on that.
_MIN_PAGE = 16


def prefill_layers(vllm_config: VllmConfig) -> Iterator[tuple[Attention, PrefillLayer]]:
    """The layers that our GPU backend serves, each with what prefill needs to know about it."""
    for layer in get_layers_from_vllm_config(vllm_config, Attention).values():
        prefill = getattr(layer.impl, "prefill_layer", None)
        if isinstance(prefill, PrefillLayer):
            yield layer, prefill


def max_gathered_tokens(vllm_config: VllmConfig, device: torch.device) -> int:
    """Most tokens of context whose rows are gathered at once; 0 if no layer gathers."""
    dtype = vllm_config.model_config.dtype
    widest_row = max(
        (
            row_bytes(prefill, layer.impl.quantized, dtype)
            for layer, prefill in prefill_layers(vllm_config)
        ),
        default=0,
    )
    memory = 0
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
    return tokens_at_once(
        widest_row,
        memory,
        vllm_config.model_config.max_model_len,
        vllm_config.scheduler_config.max_num_seqs,
    )


def tokens_at_once(row: int, memory: int, longest: int, sequences: int) -> int:
    """Most rows that are gathered at once, a power of two; 0 if no layer gathers.

    Args:
        row: Bytes of one token's gathered row; 0 if no layer gathers.
        memory: Bytes of GPU memory.
        longest: Tokens of the longest context; at least that many rows are gathered.
        sequences: Most sequences in a step; no more rows than all their contexts are needed.
    """
    if not row:
        return 0
    affordable = min(memory // _MEMORY_SHARE // row, longest * sequences)
    return max(next_power_of_2(longest), next_power_of_2(affordable + 1) // 2)


def row_bytes(layer: PrefillLayer, quantized: bool, dtype: torch.dtype) -> int:
    """Bytes of a token's gathered row; 0 if the layer's kernel reads pages."""
    if layer.reads(layer.kernel, _MIN_PAGE, quantized):
        return 0
    heads, numbers = row_shape(layer.geometry, layer.latent)
    return heads * numbers * dtype.itemsize


def prefill_bytes(
    layer: PrefillLayer, tokens: int, gathered: int, quantized: bool, dtype: torch.dtype
) -> int:
    """Most bytes that prefill_attention allocates beside its arguments, for query `tokens`.

    `gathered` is what `max_gathered_tokens` returns; `quantized` says whether the KV cache is fp8;
    `dtype` is that of queries and of gathered rows.
    """
    geometry = layer.geometry
    kv_heads, _ = row_shape(geometry, layer.latent)
    bytes_by_kernel = [0]
    for kernel in (layer.kernel, layer.in_place):
        kernel_sizes = kernel and widths(kernel, layer.sizes, layer.capability)
        if kernel is None or not kernel_sizes:
            continue
        key_size, value_size = kernel_sizes
        copied = key_size * (key_size != geometry.query_size)
        copied += value_size * (value_size != geometry.value_size)
        copies = tokens * geometry.query_heads * copied * dtype.itemsize
        scratch = kernel_bytes(kernel, tokens, geometry.query_heads, kv_heads, value_size, dtype)
        bytes_by_kernel.append(copies + scratch)
    return gathered * row_bytes(layer, quantized, dtype) + max(bytes_by_kernel)

"""How much memory prefill takes at most on a GPU, and that vLLM leaves it free beside the KV cache.

Gathered rows (kernels/context.py) hold the whole context of a sequence, which may be long while its
new tokens are few: 80 requests that share 120,000 tokens would need 22.9 GiB in one step. So rows
of only so many tokens are gathered at once as take a 128th of the GPU's memory, but of one whole
context at least. Of Llama-3-8B's shape (8 KV heads, bf16) and 131,072 tokens of context those are
320 MiB with rotary heads of (96, 64) and 512 MiB with latent keys and values of 128, 640 MiB and
1 GiB where a GPU has 141 GB.

vLLM measures what a step needs beside the cache in a run without attention, so that run allocates
in every layer what prefill may take there, and frees it, as vLLM's own MLA does.
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

_SHARE = 128  # of the GPU's memory, that gathered rows may take beyond one context
_SMALLEST_PAGE = 16  # FlashAttention 4 reads larger ones, but what is reserved must not hang on it


def prefill_layers(vllm_config: VllmConfig) -> Iterator[tuple[Attention, PrefillLayer]]:
    """The layers whose attention is ours, on a GPU."""
    for layer in get_layers_from_vllm_config(vllm_config, Attention).values():
        prefill = getattr(layer.impl, "prefill_layer", None)
        if isinstance(prefill, PrefillLayer):
            yield layer, prefill


def most_gathered(vllm_config: VllmConfig, device: torch.device) -> int:
    """Tokens of context whose rows are gathered at once; 0 if no layer gathers."""
    dtype = vllm_config.model_config.dtype
    widest = max(
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
        widest,
        memory,
        vllm_config.model_config.max_model_len,
        vllm_config.scheduler_config.max_num_seqs,
    )


def tokens_at_once(row: int, memory: int, longest: int, sequences: int) -> int:
    """As many rows of `row` bytes as a GPU of so much `memory` gathers at once, a power of two.

    At least one context of `longest` tokens, and no more than of all `sequences`.
    """
    if not row:
        return 0
    shared = min(memory // _SHARE // row, longest * sequences)
    return max(next_power_of_2(longest), next_power_of_2(shared + 1) // 2)


def row_bytes(layer: PrefillLayer, quantized: bool, dtype: torch.dtype) -> int:
    """Bytes of a token's gathered row; 0 if the layer's kernel meets cached rows in their pages."""
    if layer.reads(layer.kernel, _SMALLEST_PAGE, quantized):
        return 0
    heads, numbers = row_shape(layer.geometry, layer.latent)
    return heads * numbers * dtype.itemsize


def prefill_bytes(
    layer: PrefillLayer, tokens: int, gathered: int, quantized: bool, dtype: torch.dtype
) -> int:
    """What prefill_attention holds at most beside its arguments, in a step of so many tokens.

    `gathered` is most_gathered's.
    """
    g, beside = layer.geometry, [0]
    kv_heads, _ = row_shape(g, layer.latent)
    for kernel in (layer.kernel, layer.in_place):
        at = kernel and widths(kernel, layer.sizes, layer.capability)
        if kernel is None or not at:
            continue
        copied = at[0] * (at[0] != g.query_size) + at[1] * (at[1] != g.value_size)
        own = kernel_bytes(kernel, tokens, g.query_heads, kv_heads, at[1], dtype)
        beside.append(tokens * g.query_heads * copied * dtype.itemsize + own)
    return gathered * row_bytes(layer, quantized, dtype) + max(beside)

"""Prefill of layers that stock attention refuses, made into ones that it takes.

The context of the prefilling sequences is gathered from the packed cache once per chunk; latent
keys are rebuilt; the narrower of keys and values is padded with zeros, which changes nothing; and
vLLM's FlashAttention runs on the result.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import pad
from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func, get_flash_attn_version

from vllm_gac.kernels.reference import CacheGeometry, LatentKeys
from vllm_gac.rope import cos_sin, rotate

# FlashAttention wants head sizes that are multiples of this.
_GRANULE = 8


@dataclass
class PrefillBatch:
    """The prefilling sequences of one step; int32 and int64 tensors on the device.

    query_starts and context_starts [sequences + 1] are cumulative lengths; sequence and position
    [context tokens] say which token each row of the gathered context is.
    """

    query_starts: torch.Tensor
    context_starts: torch.Tensor
    sequence: torch.Tensor
    position: torch.Tensor
    block_table: torch.Tensor
    longest_query: int
    longest_context: int


def prefill_batch(
    query_starts: torch.Tensor, context_lengths: torch.Tensor, block_table: torch.Tensor
) -> PrefillBatch:
    """Describe sequences by host tensors query_starts [n + 1] (from 0) and context_lengths [n].

    block_table [n, blocks] is on the device, where the rest is sent.
    """
    device, count = block_table.device, context_lengths.shape[0]
    context_starts = torch.zeros(count + 1, dtype=torch.int32)
    torch.cumsum(context_lengths, 0, out=context_starts[1:])
    sequence = torch.repeat_interleave(torch.arange(count), context_lengths.long())
    position = torch.arange(sequence.shape[0]) - context_starts[sequence]
    return PrefillBatch(
        query_starts=query_starts.to(device, torch.int32, non_blocking=True),
        context_starts=context_starts.to(device, non_blocking=True),
        sequence=sequence.to(device, non_blocking=True),
        position=position.to(device, non_blocking=True),
        block_table=block_table,
        longest_query=int((query_starts[1:] - query_starts[:-1]).max()),
        longest_context=int(context_lengths.max()),
    )


def prefill_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    batch: PrefillBatch,
    geometry: CacheGeometry,
    scale: float,
    output: torch.Tensor,
    window: int | None = None,
    latent: LatentKeys | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Causal attention of the batch's query tokens over their cached contexts.

    query [tokens, query_heads, query_size]; kv_cache [blocks, value_heads, block_size, row], fp8
    where the scales are given. Writes output [tokens, query_heads, value_size].
    """
    keys, values = _context(kv_cache, batch, geometry, query.dtype, k_scale, v_scale)
    if latent is not None:
        keys = _rebuilt(keys, batch.position, latent)
    shared = keys.shape[1] // values.shape[1]
    size = -(-max(keys.shape[2], values.shape[2]) // _GRANULE) * _GRANULE
    attended = flash_attn_varlen_func(
        q=_widened(query, size),
        k=_widened(keys, size),
        v=_widened(values.repeat_interleave(shared, 1) if shared > 1 else values, size),
        max_seqlen_q=batch.longest_query,
        cu_seqlens_q=batch.query_starts,
        max_seqlen_k=batch.longest_context,
        cu_seqlens_k=batch.context_starts,
        softmax_scale=scale,
        causal=True,
        window_size=None if window is None else [window - 1, 0],
        fa_version=get_flash_attn_version(head_size=size),
    )
    output.copy_(attended[..., : geometry.value_size])


def _context(
    kv_cache: torch.Tensor,
    batch: PrefillBatch,
    geometry: CacheGeometry,
    dtype: torch.dtype,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cached keys [tokens, key_heads, key_size] and values [tokens, value_heads, value_size]."""
    block_size = kv_cache.shape[2]
    block = batch.block_table[batch.sequence, batch.position // block_size].long()
    rows = kv_cache[block, :, batch.position % block_size].to(dtype)
    keys = rows[..., : geometry.key_width]
    values = rows[..., geometry.key_width :]
    if k_scale is not None and v_scale is not None:
        keys, values = keys * k_scale.to(dtype), values * v_scale.to(dtype)
    return keys.reshape(-1, geometry.key_heads, geometry.key_size), values


def _rebuilt(latents: torch.Tensor, position: torch.Tensor, latent: LatentKeys) -> torch.Tensor:
    """Latents [tokens, key_heads, key_size] -> rotated keys [tokens, KV heads, head_dim]."""
    keys = torch.einsum("thr,hdr->thd", latents, latent.up)
    keys = keys.reshape(latents.shape[0], -1, 2 * latent.inv_freq.shape[-1])
    return rotate(keys, *cos_sin(position, latent.inv_freq))


def _widened(x: torch.Tensor, size: int) -> torch.Tensor:
    return x if x.shape[-1] == size else pad(x, (0, size - x.shape[-1]))

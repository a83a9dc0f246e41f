"""Prefill: the context of each sequence, as the layer's kernel wants it, and the kernel on it.

A step's own keys and values serve as they are where they are the whole context; else kernels that
read pages get the packed cache itself; else rows are gathered once per chunk (kernels/context.py).

A kernel that takes only equal sizes gets views of the larger one over the packed rows: keys from
the front of a row, values up to its end. Queries are then padded with zeros, or what the surplus
columns of the values add in front of the result is left out.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from vllm_gac.errors import GacError
from vllm_gac.kernels.columns import copy_columns
from vllm_gac.kernels.context import Source, gather_rows
from vllm_gac.kernels.reference import CacheGeometry, LatentKeys
from vllm_gac.kernels.select import GRANULE, whole, widths
from vllm_gac.serving.prefill_kernels import Context, attend, reads_pages


@dataclass(frozen=True, slots=True)
class PrefillBatch:
    """The prefilling sequences of one step.

    query_starts and context_starts int32 [sequences + 1] are cumulative lengths, lengths int32
    [sequences] those of the contexts, new tokens included; block_table int32 [sequences, blocks].
    """

    query_starts: torch.Tensor
    context_starts: torch.Tensor
    lengths: torch.Tensor
    block_table: torch.Tensor
    longest_query: int
    longest_context: int
    context_tokens: int
    has_past: bool  # whether any sequence had tokens cached before


@dataclass(frozen=True, slots=True)
class PrefillLayer:
    """What prefill needs to know of a layer; `kernel` is one of select.PREFILL_KERNELS."""

    geometry: CacheGeometry
    kernel: str
    capability: tuple[int, int]
    scale: float
    window: int | None = None
    latent: LatentKeys | None = None


def prefill_batch(
    query_starts: torch.Tensor,
    context_lengths: torch.Tensor,
    lengths: torch.Tensor,
    block_table: torch.Tensor,
) -> PrefillBatch:
    """Describe sequences by host tensors query_starts [n + 1] (from 0) and context_lengths [n].

    lengths, which are the context lengths, and block_table [n, blocks] are on the device.
    """
    query_lengths = query_starts[1:] - query_starts[:-1]
    context_starts = pad(context_lengths.cumsum(0), (1, 0))
    starts = torch.stack([query_starts, context_starts]).int()
    on_device = starts.to(lengths.device, non_blocking=True)  # one copy for both
    return PrefillBatch(
        query_starts=on_device[0],
        context_starts=on_device[1],
        lengths=lengths,
        block_table=block_table,
        longest_query=int(query_lengths.max()),
        longest_context=int(context_lengths.max()),
        context_tokens=int(context_starts[-1]),
        has_past=bool((context_lengths > query_lengths).any()),
    )


def prefill_attention(
    layer: PrefillLayer,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    batch: PrefillBatch,
    output: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Causal attention of the batch's query tokens over their contexts, already cached.

    query [tokens, query_heads, query_size]; key [tokens, value_heads, key_width] and value [tokens,
    value_heads, value_size] are those tokens' own; kv_cache [blocks, value_heads, block_size, row],
    fp8 where the scales are given. Writes output [tokens, query_heads, value_size].

    Raises GacError if the kernel refuses the layer's head sizes.
    """
    g = layer.geometry
    sizes = whole(g.query_size), whole(g.value_size)
    at = widths(layer.kernel, sizes, layer.capability)
    if at is None:
        raise GacError(f"{layer.kernel} does not take heads of {sizes} on this GPU")
    as_it_is = at == (g.query_size, g.value_size)
    pages = k_scale is None and reads_pages(layer.kernel, max(at), kv_cache.shape[2])
    keys, values, context = _context(
        layer, as_it_is, pages, key, value, kv_cache, batch, k_scale, v_scale
    )
    attended = output
    if at[1] != g.value_size:
        attended = output.new_empty(*output.shape[:2], at[1])
    if at[0] != g.query_size:
        wide = query.new_empty(*query.shape[:2], at[0])
        copy_columns(query, wide)
        query = wide
    attend(
        layer.kernel,
        query,
        keys[..., : at[0]],
        values[..., values.shape[-1] - at[1] :],
        batch.query_starts,
        batch.longest_query,
        context,
        layer.scale,
        layer.window,
        attended,
    )
    if attended is not output:
        copy_columns(attended, output, first=at[1] - sizes[1])


def _context(
    layer: PrefillLayer,
    as_it_is: bool,
    pages: bool,
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    batch: PrefillBatch,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, Context]:
    """Keys, values, and where each sequence's begin; or twice whole rows, and that.

    `as_it_is`: the kernel takes the head sizes as they are; `pages`: it reads this cache.
    """
    g = layer.geometry
    plain = layer.latent is None and g.key_heads == g.value_heads
    plain = plain and not (g.key_size % GRANULE or g.value_size % GRANULE)
    after_each_other = Context(batch.longest_context, starts=batch.context_starts)
    if plain and as_it_is and not batch.has_past:
        return key, value, after_each_other
    if plain and pages:
        rows = kv_cache.transpose(1, 2)  # [block, token, head, row]
        in_pages = Context(
            batch.longest_context, lengths=batch.lengths, block_table=batch.block_table
        )
        return rows, rows, in_pages
    cached_keys, cached_values = kv_cache.split([g.key_width, g.value_size], dim=-1)
    source = Source(cached_keys, cached_values, batch.block_table, k_scale, v_scale)
    if not batch.has_past:
        source = Source(key, value)
    rows = gather_rows(
        source,
        batch.context_starts,
        batch.context_tokens,
        batch.longest_context,
        g,
        key.dtype,
        layer.latent,
    )
    return rows, rows, after_each_other

"""Attention over the packed paged cache in plain torch: for CPUs, and to test the kernels against.

It works in tiles of queries and context, so its memory does not grow with either.

A head gives the same bits whether it is padded with zeros or not. The order in which a GEMM adds
depends on its sizes, so head sizes are first rounded up, to the same size in both cases.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from vllm_gac.layout.cache_geometry import CacheGeometry
from vllm_gac.layout.rope import cos_sin, rotate
from vllm_gac.layout.rounding import ceil_div, round_up

# Head sizes are rounded up to multiples of it. Alignment (alignment/rules.py) never crosses one.
_WHOLE = 64
# The most elements in any tensor that attention makes, whatever heads, chunk and context are:
# 16 MiB in fp32, and fewer than eight such tensors live at once. And the most query tokens in a
# tile.
_MAX_ELEMENTS, _ROWS = 1 << 22, 256


@dataclass(frozen=True, slots=True)
class LatentKeys:
    """Rebuilds keys from cached latents (PaLU): K = up @ latent, then RoPE.

    up: [key_heads, group * head_dim, key_size]; a latent gives keys to `group` KV heads.
    inv_freq: fp32 [1, head_dim / 2].
    """

    up: torch.Tensor
    inv_freq: torch.Tensor

    def rebuild(self, latents: torch.Tensor, first: int) -> torch.Tensor:
        """Rotated keys [KV heads, tokens, head_dim] of latents [key_heads, tokens, key_size].

        `first` is the position of the first token; the others follow it.
        """
        heads, tokens, _ = latents.shape
        head_dim = 2 * self.inv_freq.shape[-1]
        up = _pad_to_whole(self.up.to(latents.dtype))
        keys = _pad_to_whole(latents) @ up.transpose(1, 2)
        keys = keys.view(heads, tokens, -1, head_dim).transpose(1, 2).reshape(-1, tokens, head_dim)
        positions = torch.arange(first, first + tokens, device=latents.device)
        cos, sin = cos_sin(positions, self.inv_freq)
        return rotate(keys, cos.squeeze(1), sin.squeeze(1))


def write_cache(
    key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Write keys and values to the cache.

    Args:
        key: [tokens, value_heads, key_width].
        value: [tokens, value_heads, value_size].
        kv_cache: [blocks, value_heads, block_size, key_width + value_size].
        slot_mapping: [tokens]; slot s is row s % block_size of block s // block_size. Negative
            slots are padding and are not written.
    """
    slot_mapping = slot_mapping[: key.shape[0]]
    used = slot_mapping >= 0
    slots = slot_mapping[used]
    block_size, key_width = kv_cache.shape[2], key.shape[2]
    block, row = slots // block_size, slots % block_size
    tokens = slot_mapping.shape[0]
    kv_cache[block, :, row, :key_width] = key[:tokens][used].to(kv_cache.dtype)
    kv_cache[block, :, row, key_width:] = value[:tokens][used].to(kv_cache.dtype)


def paged_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_starts: Sequence[int],
    context_lengths: Sequence[int],
    geometry: CacheGeometry,
    scale: float,
    output: torch.Tensor,
    window: int | None = None,
    latent: LatentKeys | None = None,
) -> None:
    """Causal attention of every sequence of a batch over its cached context, in fp32.

    Keys and values of all tokens, the new ones included, are in the cache already.

    Args:
        query: [tokens, query_heads, query_size].
        kv_cache: [blocks, value_heads, block_size, key_width + value_size].
        block_table: [sequences, blocks].
        query_starts: [sequences + 1]; sequence i has the query tokens from query_starts[i] up to
            query_starts[i + 1], and they are the last tokens of its context.
        context_lengths: [sequences], in tokens.
        geometry: head counts and sizes.
        scale: of the scores.
        output: [tokens, query_heads, value_size]; this is what is written. Sequences of length 0,
            which pad a captured batch, get zeros.
        window: tokens that a query sees, itself included; None for all.
        latent: what rebuilds the keys if the cache holds latents.
    """
    for i, length in enumerate(context_lengths):
        if not length:
            output[query_starts[i] : query_starts[i + 1]] = 0
            continue
        position = length - (query_starts[i + 1] - query_starts[i])  # of the first query token
        if position == length:
            continue
        context = _Context(kv_cache, block_table[i], geometry, latent)
        rows, tile = _tiles(context)
        queries = query[query_starts[i] : query_starts[i + 1]].split(rows)
        outputs = output[query_starts[i] : query_starts[i + 1]].split(rows)
        for some, attended in zip(queries, outputs, strict=True):
            _attend(some, context, position, tile, scale, window, attended)
            position += len(some)


@dataclass(frozen=True, slots=True)
class _Context:
    """One sequence's rows in the cache; they are in `blocks`."""

    kv_cache: torch.Tensor
    blocks: torch.Tensor
    geometry: CacheGeometry
    latent: LatentKeys | None

    def rows(self, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys, rebuilt if latent, and values of rows first..last: fp32 [heads, tokens, size]."""
        g, block_size = self.geometry, self.kv_cache.shape[2]
        start = first // block_size * block_size
        rows = self.kv_cache[self.blocks[start // block_size : ceil_div(last, block_size)].long()]
        rows = rows.transpose(1, 2).flatten(0, 1)  # [tokens, value_heads, row]
        rows = rows[first - start : last - start].float()
        keys = rows[..., : g.key_width].reshape(-1, g.key_heads, g.key_size).transpose(0, 1)
        if self.latent is not None:
            keys = self.latent.rebuild(keys, first)
        return keys, rows[..., g.key_width :].transpose(0, 1)


def _tiles(context: _Context) -> tuple[int, int]:
    """How many query tokens and how many context tokens a tile has.

    Queries, rows, scores and results then stay within _MAX_ELEMENTS. Sizes are counted as padded by
    `_pad_to_whole`, so that a layer and its padded copy have the same tiles.
    """
    g, latent = context.geometry, context.latent
    rebuilt = g.key_heads if latent is None else g.key_heads * latent.up.shape[1] // g.query_size
    query_size, key_size, value_size = (
        round_up(size, _WHOLE) for size in (g.query_size, g.key_size, g.value_size)
    )
    rows = min(_ROWS, max(1, _MAX_ELEMENTS // (g.query_heads * max(query_size, value_size))))
    token = max(  # elements of one token of the context
        g.query_heads * rows,
        rebuilt * query_size,
        g.key_heads * key_size + g.value_heads * value_size,
    )
    return rows, max(1, _MAX_ELEMENTS // token)


def _attend(
    query: torch.Tensor,
    context: _Context,
    position: int,
    tile: int,
    scale: float,
    window: int | None,
    output: torch.Tensor,
) -> None:
    """Attention of query [tokens, heads, size], whose first token is at `position`, to `context`.

    With several tiles, weights are relative to the largest score so far, and the sums of earlier
    tiles are scaled down when that score grows (Milakov and Gimelshein 2018).
    """
    # A rotary head is padded at the end of each half.
    queries = _pad_to_whole(query.float().transpose(0, 1), halves=2) * scale
    end = position + len(query)
    starts = range(0 if window is None else max(0, position - window + 1), end, tile)
    peak = queries.new_full((*queries.shape[:2], 1), torch.finfo(torch.float32).min)
    total = torch.zeros_like(peak)
    result = queries.new_zeros(())
    for first in starts:
        keys, values = context.rows(first, min(first + tile, end))
        scores = _scores(queries, keys, position, first, window)
        if len(starts) == 1:
            result = _weighted(scores.softmax(-1), values)
            break
        before, peak = peak, torch.maximum(peak, scores.amax(-1, keepdim=True))
        weights, kept = scores.sub_(peak).exp_(), before.sub_(peak).exp_()
        total = total.mul_(kept).add_(weights.sum(-1, keepdim=True))
        result = _weighted(weights, values).add_(result * kept)
    else:
        result /= total
    output.copy_(result[..., : output.shape[-1]].transpose(0, 1))


def _scores(
    queries: torch.Tensor, keys: torch.Tensor, position: int, first: int, window: int | None
) -> torch.Tensor:
    """Scores [heads, queries, context]; -inf where a query does not see a token.

    The first query is at `position`, the first key at `first`.
    """
    heads, count, size = queries.shape
    grouped = queries.reshape(keys.shape[0], -1, size)
    scores = (grouped @ _pad_to_whole(keys, halves=2).transpose(1, 2)).view(heads, count, -1)
    last, oldest = first + keys.shape[1] - 1, position + count - 1 - (window or position + count)
    if last <= position and first > oldest:  # every query sees all of them
        return scores
    at = torch.arange(position, position + count, device=scores.device)[:, None]
    context = torch.arange(first, last + 1, device=scores.device)[None, :]
    hidden = context > at
    if window is not None:
        hidden |= context <= at - window
    return scores.masked_fill_(hidden, float("-inf"))


def _weighted(weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Weights [heads, queries, context] times values [value heads, context, size]."""
    heads, count, context = weights.shape
    grouped = weights.view(values.shape[0], -1, context)
    return (grouped @ _pad_to_whole(values)).view(heads, count, -1)


def _pad_to_whole(x: torch.Tensor, halves: int = 1) -> torch.Tensor:
    """x [..., size], each of its `halves` padded with zeros to a multiple of _WHOLE / halves."""
    missing = -(x.shape[-1] // halves) % (_WHOLE // halves)
    if not missing:
        return x
    return pad(x.unflatten(-1, (halves, -1)), (0, missing)).flatten(-2)

"""Attention over the packed paged cache in plain torch: the CPU path and the yardstick.

It works in tiles of queries and context, so its memory does not grow with either.

A head size padded with zeros gives the same bits: in which order a GEMM adds depends on its
sizes, so they are first brought to ones that a head has with and without padding.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from vllm_gac.layout.cache_geometry import CacheGeometry
from vllm_gac.layout.rope import cos_sin, rotate
from vllm_gac.layout.rounding import ceil_div, round_up

# No alignment of a head size (contract.py) crosses a multiple of it.
_WHOLE = 64
# Numbers of the largest tensor that attention makes, 16 MiB in fp32, whatever heads, chunk and
# context are; fewer than eight live at once. And query tokens that are met at once.
_LARGEST, _ROWS = 1 << 22, 256


@dataclass(frozen=True, slots=True)
class LatentKeys:
    """Rebuilds keys from cached latents (PaLU): K = up @ latent, then RoPE.

    up [key_heads, group * head_dim, key_size]; inv_freq fp32 [1, head_dim / 2].
    """

    up: torch.Tensor
    inv_freq: torch.Tensor

    def rebuild(self, latents: torch.Tensor, first: int) -> torch.Tensor:
        """Keys [KV heads, tokens, head_dim] of latents [key_heads, tokens, key_size].

        The tokens are at positions first, first + 1, ...
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
    """Store key [tokens, value_heads, key_width] and value [tokens, value_heads, value_size].

    Slot s is row s % block_size of block s // block_size; negative slots are padding.
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

    query [tokens, query_heads, query_size]; block_table [sequences, blocks]; sequence i owns query
    tokens query_starts[i]..query_starts[i + 1], the last of its context_lengths[i] tokens, whose
    keys and values are already cached. Writes output [tokens, query_heads, value_size]; zeros for
    the queries of a sequence of length 0, which pad a captured batch. `window` counts the tokens a
    query sees, itself included.
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
    """One sequence's rows in the cache, through its `blocks`."""

    kv_cache: torch.Tensor
    blocks: torch.Tensor
    geometry: CacheGeometry
    latent: LatentKeys | None

    def rows(self, first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows first..last as fp32 keys and values [heads, tokens, size], keys rebuilt."""
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
    """How many query tokens, and how many of the context, are met at once.

    So that queries, rows, scores and results stay within _LARGEST. Of a size counts what `_whole`
    makes of it: a layer and its padded twin are met in the same tiles.
    """
    g, latent = context.geometry, context.latent
    rebuilt = g.key_heads if latent is None else g.key_heads * latent.up.shape[1] // g.query_size
    query_size, key_size, value_size = map(_round_up, (g.query_size, g.key_size, g.value_size))
    rows = min(_ROWS, max(1, _LARGEST // (g.query_heads * max(query_size, value_size))))
    token = max(  # numbers of one token of the context
        g.query_heads * rows,
        rebuilt * query_size,
        g.key_heads * key_size + g.value_heads * value_size,
    )
    return rows, max(1, _LARGEST // token)


def _attend(
    query: torch.Tensor,
    context: _Context,
    position: int,
    tile: int,
    scale: float,
    window: int | None,
    output: torch.Tensor,
) -> None:
    """query [tokens, heads, size] from `position` on, over what they see of `context`.

    Of several tiles each is scaled by the largest score so far, and what came before again when
    that grows (Milakov and Gimelshein 2018).
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
    """Scores [heads, queries, context] of queries from `position` on and keys from `first` on.

    Those of tokens that a query does not see are -inf.
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
    """weights [heads, queries, context] on values [value heads, context, size]."""
    heads, count, context = weights.shape
    grouped = weights.view(values.shape[0], -1, context)
    return (grouped @ _pad_to_whole(values)).view(heads, count, -1)


def _pad_to_whole(x: torch.Tensor, halves: int = 1) -> torch.Tensor:
    """Each of the `halves` of x [..., size] with zeros up to a multiple of _WHOLE / halves."""
    missing = -(x.shape[-1] // halves) % (_WHOLE // halves)
    if not missing:
        return x
    return pad(x.unflatten(-1, (halves, -1)), (0, missing)).flatten(-2)


def _round_up(size: int) -> int:
    """To what `_whole` pads a size."""
    return round_up(size, _WHOLE)

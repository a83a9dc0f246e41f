"""Attention over the packed paged cache in plain torch: the CPU path and the yardstick.

A head size padded with zeros gives the same bits: in which order a GEMM adds depends on its
sizes, so they are first brought to ones that a head has with and without padding.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from vllm_gac.rope import cos_sin, rotate

# No alignment of a head size (contract.py) crosses a multiple of it.
_WHOLE = 64


@dataclass(frozen=True, slots=True)
class CacheGeometry:
    """How one rank's rows of a layer's cache are packed.

    The cache is [blocks, value_heads, block_size, row]; the row of a value head holds the key
    parts of its key_heads / value_heads key heads, `key_size` numbers each, then its value.
    """

    query_heads: int
    query_size: int
    key_heads: int
    key_size: int
    value_heads: int
    value_size: int

    @property
    def key_width(self) -> int:
        """Numbers of a row that are keys; the rest is the value."""
        return self.key_heads * self.key_size // self.value_heads


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
        up = _whole(self.up.to(latents.dtype))
        keys = _whole(latents) @ up.transpose(1, 2)
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
    keys and values are already cached. Writes output [tokens, query_heads, value_size]. `window`
    counts the tokens a query sees, itself included.
    """
    for i, length in enumerate(context_lengths):
        begin, end = query_starts[i], query_starts[i + 1]
        if begin == end:
            continue
        position = length - (end - begin)  # of the first query token
        first = 0 if window is None else max(0, position - window + 1)
        keys, values = _gather(kv_cache, block_table[i], first, length, geometry)
        if latent is not None:
            keys = latent.rebuild(keys, first)
        mask = _visible(position, length, first, window, query.device)
        output[begin:end] = _attend(query[begin:end], keys, values, mask, scale).to(output.dtype)


def _gather(
    kv_cache: torch.Tensor, blocks: torch.Tensor, first: int, last: int, geometry: CacheGeometry
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cached rows first..last of one sequence as fp32 keys and values [heads, tokens, size]."""
    block_size = kv_cache.shape[2]
    start_block = first // block_size
    rows = kv_cache[blocks[start_block : -(-last // block_size)].long()]
    rows = rows.transpose(1, 2).flatten(0, 1)  # [tokens, value_heads, row]
    rows = rows[first - start_block * block_size : last - start_block * block_size].float()
    keys = rows[..., : geometry.key_width].reshape(-1, geometry.key_heads, geometry.key_size)
    return keys.transpose(0, 1), rows[..., geometry.key_width :].transpose(0, 1)


def _visible(
    position: int, length: int, first: int, window: int | None, device: torch.device
) -> torch.Tensor:
    """Which of the context tokens first..length each query token from `position` on may see."""
    queries = torch.arange(position, length, device=device)[:, None]
    context = torch.arange(first, length, device=device)[None, :]
    visible = context <= queries
    return visible if window is None else visible & (context > queries - window)


def _attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """query [tokens, heads, size] on keys and values [their heads, context, size]."""
    size = values.shape[-1]
    # A rotary head is padded at the end of each half.
    queries = _whole(query.float().transpose(0, 1), halves=2)
    keys, values = _whole(keys, halves=2), _whole(values)
    heads = queries.shape[0]
    keys = keys.repeat_interleave(heads // keys.shape[0], dim=0)
    values = values.repeat_interleave(heads // values.shape[0], dim=0)
    scores = queries @ keys.transpose(1, 2) * scale
    scores.masked_fill_(~mask, float("-inf"))
    return (scores.softmax(dim=-1) @ values)[..., :size].transpose(0, 1)


def _whole(x: torch.Tensor, halves: int = 1) -> torch.Tensor:
    """Each of the `halves` of x [..., size] with zeros up to a multiple of _WHOLE / halves."""
    missing = -(x.shape[-1] // halves) % (_WHOLE // halves)
    if not missing:
        return x
    return pad(x.unflatten(-1, (halves, -1)), (0, missing)).flatten(-2)

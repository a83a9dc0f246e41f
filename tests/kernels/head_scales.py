"""Scales of an fp8 cache that differ from head to head, and what they make of its rows."""

import torch

from vllm_gac.layout.cache_geometry import CacheGeometry


def spread(heads: int, smallest: float) -> torch.Tensor:
    """A scale for each of `heads`, from `smallest` to ten times as much."""
    return smallest * 10 ** torch.linspace(0, 1, heads)


def row_scales(g: CacheGeometry, k_scale: torch.Tensor, v_scale: torch.Tensor) -> torch.Tensor:
    """What the numbers of cached rows are multiplied by, [value_heads, 1, row].

    The scales are of one element each, or of one for each key head and for each value head.
    """
    keys = k_scale.expand(g.key_heads).view(g.value_heads, -1).repeat_interleave(g.key_size, 1)
    values = v_scale.expand(g.value_heads)[:, None].expand(-1, g.value_size)
    return torch.cat([keys, values], 1)[:, None]

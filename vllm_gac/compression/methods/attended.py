"""o_proj over query heads that read several neighbouring value heads."""

import torch


def expand_o_proj(
    output: torch.Tensor, value_heads: int, head_dim: int, group: int
) -> torch.Tensor:
    """o_proj for query heads that read `group` value heads, of which they use only their own.

    [hidden, query_heads * D] -> [hidden, query_heads * group * D], zero for the other value heads.
    """
    own = own_columns(output.shape[1] // head_dim, value_heads, head_dim, group)
    spread = output.new_zeros(output.shape[0], output.shape[1] * group)
    spread[:, own.to(output.device)] = output
    return spread


def own_columns(query_heads: int, value_heads: int, head_dim: int, group: int) -> torch.Tensor:
    """Which of query_heads * group * D columns are of a query head's own value head.

    Returns [query_heads * D] indices.
    """
    head = torch.arange(query_heads)
    slot = head * group + head // (query_heads // value_heads) % group
    return (slot[:, None] * head_dim + torch.arange(head_dim)).flatten()

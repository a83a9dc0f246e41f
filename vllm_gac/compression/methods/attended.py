"""What query heads read from value heads, over several neighbouring ones at a time."""

import torch


def spread_output(
    output: torch.Tensor, value_heads: int, head_dim: int, group: int
) -> torch.Tensor:
    """o_proj for query heads that read `group` value heads at once, of which only one is theirs.

    [hidden, query_heads * D] -> [hidden, query_heads * group * D], zero for the others.
    """
    own = own_columns(output.shape[1] // head_dim, value_heads, head_dim, group)
    spread = output.new_zeros(output.shape[0], output.shape[1] * group)
    spread[:, own.to(output.device)] = output
    return spread


def own_columns(query_heads: int, value_heads: int, head_dim: int, group: int) -> torch.Tensor:
    """Which of query_heads * group * D columns are each query head's own, [query_heads * D]."""
    head = torch.arange(query_heads)
    slot = head * group + head // (query_heads // value_heads) % group
    return (slot[:, None] * head_dim + torch.arange(head_dim)).flatten()

"""Fewer and smaller value heads, the way back absorbed in o_proj."""

import torch

from vllm_gac.methods.lowrank import factorize

# Ridge of the o_proj refit, in units of the mean variance of its inputs.
_RIDGE = 1e-5


def merge_values(
    value: torch.Tensor,
    output: torch.Tensor,
    covariance: torch.Tensor,
    value_heads: int,
    group: int,
    size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One value head of `size` for each group of `group` of the model's `value_heads`.

    value [value_heads * D, hidden], output (o_proj) [hidden, query_heads * D] -> the smaller
    v_proj [value_heads / group * size, hidden] and o_proj [hidden, query_heads * size], and the
    covariance of the new o_proj's input.

    `covariance` [query_heads * group * D] ^ 2 is that of what each query head reads from all
    `group` value heads, its own among them. Attention is linear in the values, so a projection
    of the values is the same projection of that. The best one per group under o_proj is taken
    (`factorize` with both metrics); o_proj is then refitted by least squares to what it gave.
    """
    narrow = value.shape[0] // value_heads
    groups, wide = value_heads // group, narrow * group
    query_heads = output.shape[1] // narrow
    dense_output = spread_output(output.double(), value_heads, narrow, group)
    covariance = covariance.double()
    ridge = _RIDGE * covariance.diagonal().mean()
    covariance = covariance + ridge * torch.eye(len(covariance), device=output.device)

    heads = torch.arange(query_heads).chunk(groups)
    down = torch.stack([_projection(dense_output, covariance, h, wide, size) for h in heads])
    per_query = down.repeat_interleave(query_heads // groups, 0)
    # [query_heads * size, query_heads * wide]
    project: torch.Tensor = torch.block_diag(*per_query)  # type: ignore[no-untyped-call]
    crossed = project @ covariance
    inner = crossed @ project.T
    refitted = torch.linalg.solve(inner, crossed @ dense_output.T).T
    smaller = down @ value.double().view(groups, wide, -1)
    return smaller.flatten(0, 1), refitted, inner


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


def _projection(
    output: torch.Tensor, covariance: torch.Tensor, heads: torch.Tensor, wide: int, size: int
) -> torch.Tensor:
    """The best projection [size, wide] for the query heads `heads`, which share one value head."""
    metric = torch.zeros(wide, wide, dtype=torch.float64, device=output.device)
    moment = torch.zeros_like(metric)
    for head in heads.tolist():
        columns = slice(head * wide, (head + 1) * wide)
        metric += output[:, columns].T @ output[:, columns]
        moment += covariance[columns, columns]
    return factorize(torch.eye(wide, device=output.device), moment, metric).truncate(size)[1]

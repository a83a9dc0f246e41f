"""The tensors that are made from PaLU's factors.

Products are computed in fp32; results have the dtype of the factors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def latents(vt: Tensor, ranks: Sequence[int], size: int) -> Tensor:
    """VT [all ranks, hidden] -> [groups * size, hidden], each group's rows padded with zeros."""
    import torch

    out = vt.new_zeros(len(ranks), size, vt.shape[1])
    for group, rows in enumerate(torch.split(vt, list(ranks))):
        out[group, : len(rows)] = rows
    return out.flatten(0, 1)


def constant_latents(vt: Tensor, groups: int, size: int) -> Tensor:
    """The bias [groups * size] under which the last latent number of each group is always 1."""
    bias = vt.new_zeros(groups, size)
    bias[:, -1] = 1
    return bias.flatten()


def up_projections(*factors: Tensor, groups: int, size: int) -> Tensor:
    """U of each group [group dim, rank] -> [groups, group dim, size], padded with zeros.

    Biases [group dim], if there are any, come after the factors, and become the last column.
    """
    ups, biases = factors[:groups], factors[groups:]
    out = ups[0].new_zeros(groups, ups[0].shape[0], size)
    for group, up in enumerate(ups):
        out[group, :, : up.shape[1]] = up
    for group, bias in enumerate(biases):
        out[group, :, -1] = bias
    return out


def whole(vt: Tensor, *ups: Tensor) -> Tensor:
    """The linear before its factorization: U @ VT of every group, stacked."""
    import torch

    rows = torch.split(vt, [up.shape[1] for up in ups])
    products = [up.float() @ down.float() for up, down in zip(ups, rows, strict=True)]
    return torch.cat(products).to(vt.dtype)


def joined(*biases: Tensor) -> Tensor:
    """The concatenated biases of all groups."""
    import torch

    return torch.cat(biases)


def no_bias(vt: Tensor, size: int) -> Tensor:
    """A bias of zeros."""
    return vt.new_zeros(size)


def absorbed(
    o: Tensor, *factors: Tensor, groups: int, kv_heads: int, query_heads: int, size: int
) -> Tensor:
    """o_proj [hidden, query heads * head dim] for latent values: [hidden, query heads * size].

    The columns of a query head are multiplied by the rows of U that made the values of its KV head.
    `factors` are as in `up_projections`.
    """
    import torch

    up = up_projections(*factors, groups=groups, size=size).view(kv_heads, -1, size)
    heads = o.view(o.shape[0], kv_heads, query_heads // kv_heads, -1)
    return torch.einsum("ohqd,hdr->ohqr", heads.float(), up.float()).flatten(1).to(o.dtype)


def absorbed_bias(bias: Tensor, o: Tensor, *v_biases: Tensor, kv_heads: int) -> Tensor:
    """The bias of o_proj plus that of V, which attention passes on: its weights sum to one."""
    constant = joined(*v_biases).float().view(kv_heads, 1, -1)
    queries = o.shape[1] // (kv_heads * constant.shape[-1])
    return (bias.float() + o.float() @ constant.expand(-1, queries, -1).flatten()).to(bias.dtype)

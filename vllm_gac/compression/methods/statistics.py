"""The statistics of a layer as methods use them, and what becomes of them.

The errors of a linear's output are weighted by its metric (compression/output_metrics.py). A method
that changes the rows of a linear changes its metric, too: if the old output is U times the new one,
the new metric is U^T M U.
"""

from collections.abc import Mapping
from typing import Any

import torch

from vllm_gac.compression.methods.base import MeasuredLayer

# The names of statistics: E|q_f|^2 of each pair [key heads * D / 2] after the norm of the queries,
# summed over the query heads that share a key head; and the covariance [key heads * D] ^ 2 of the
# keys, divided by their root mean squares, without the weight of the norm.
QUERY_ENERGY, NORMED_KEYS = "query_energy", "normed_keys"

# Linear layers that share their input with another one, under whose name the covariance is kept.
_INPUT_OF = {
    "self_attn.k_proj": "self_attn.q_proj",
    "self_attn.v_proj": "self_attn.q_proj",
    "mlp.up_proj": "mlp.gate_proj",
}
_OF_INPUT = ("mlp.gate_proj", "mlp.up_proj")


def metric_of(linear: str) -> str:
    """The name of the metric of `linear` among the statistics of a layer."""
    return f"metric.{linear}"


def of_input(linear: str) -> bool:
    """Whether the metric of `linear` is W^T G W [in, in] instead of G [out, out]."""
    return linear in _OF_INPUT


def transformed(
    statistics: Mapping[str, torch.Tensor], linear: str, back: torch.Tensor
) -> dict[str, torch.Tensor]:
    """The changed metric of `linear` by its name, if it was measured.

    The old output [out] is about `back` [out, new out] times the new one.
    """
    name = metric_of(linear)
    return {name: back.T @ statistics[name] @ back} if name in statistics else {}


def selected(
    statistics: Mapping[str, torch.Tensor], linear: str, rows: torch.Tensor
) -> dict[str, torch.Tensor]:
    """As `transformed`, for a linear of which the `rows` stay, [new out] indices."""
    name = metric_of(linear)
    return {name: statistics[name][rows][:, rows]} if name in statistics else {}


def without(statistics: Mapping[str, Any], *linears: str) -> dict[str, Any]:
    """The statistics without the metrics of `linears`, whose new outputs they do not fit."""
    names = [metric_of(linear) for linear in linears]
    return {name: tensor for name, tensor in statistics.items() if name not in names}


def expand_o_proj(
    output: torch.Tensor, value_heads: int, head_dim: int, group: int
) -> torch.Tensor:
    """o_proj for query heads that read `group` value heads, of which they use only their own.

    [hidden, query_heads * D] -> [hidden, query_heads * group * D], zero for the other value heads.
    """
    columns = own_columns(output.shape[1] // head_dim, value_heads, head_dim, group)
    spread = output.new_zeros(output.shape[0], output.shape[1] * group)
    spread[:, columns.to(output.device)] = output
    return spread


def own_columns(query_heads: int, value_heads: int, head_dim: int, group: int) -> torch.Tensor:
    """Which of query_heads * group * D columns are of a query head's own value head.

    Returns [query_heads * D] indices.
    """
    head = torch.arange(query_heads)
    slot = head * group + head // (query_heads // value_heads) % group
    return (slot[:, None] * head_dim + torch.arange(head_dim)).flatten()


def input_of(linear: str) -> str:
    """The linear under whose name the covariance of `linear`'s input is kept."""
    return _INPUT_OF.get(linear, linear)


def input_covariance(layer: MeasuredLayer, linear: str) -> torch.Tensor:
    """The covariance [in, in] of the input of `linear`.

    What is kept may be larger: o_proj's may span several value heads, and that of biased linear
    layers has a 1, which the bias, kept as it is, does not need.
    """
    covariance = layer.covariances[input_of(linear)]
    width = layer.weights[f"{linear}.weight"].shape[1]
    if len(covariance) == width + 1:
        return covariance[:width, :width]
    if len(covariance) == width:
        return covariance
    layout = layer.layout
    columns = own_columns(
        layout.num_attention_heads,
        layout.num_key_value_heads,
        layout.head_dim,
        len(covariance) // width,
    )
    return covariance[columns][:, columns]


def tail_sums(energies: torch.Tensor) -> torch.Tensor:
    """Energies [n] in the order in which they are kept -> sums [n + 1] that 0 ... n leave out."""
    zero = energies.new_zeros(1)
    return torch.cat((energies.flip(0).cumsum(0).flip(0), zero)).clamp_min(0)

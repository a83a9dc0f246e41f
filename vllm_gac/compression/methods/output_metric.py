"""What the errors of a linear's output are weighted by (compression/output_metrics.py).

A method that changes the rows of a linear changes its metric, too: if the old output is U times the
new one, the new metric is U^T M U.
"""

from collections.abc import Mapping
from typing import Any

import torch

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
    """As `transformed`, for a linear of which the `rows` stay."""
    name = metric_of(linear)
    return {name: statistics[name][rows][:, rows]} if name in statistics else {}


def without(statistics: Mapping[str, Any], *linears: str) -> dict[str, Any]:
    """The statistics without the metrics of `linears`, whose new outputs they do not fit."""
    names = [metric_of(linear) for linear in linears]
    return {name: tensor for name, tensor in statistics.items() if name not in names}

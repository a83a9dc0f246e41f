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


def shrunk(moment: torch.Tensor, samples: int, target: torch.Tensor | None = None) -> torch.Tensor:
    """A second moment [n, n] of few samples, closer to `target`, by default the identity.

    The target is scaled to the trace of the moment. The shares of both are those of the oracle
    approximating shrinkage (Chen, Wiesel, Eldar and Hero, "Shrinkage Algorithms for MMSE Covariance
    Estimation", IEEE Transactions on Signal Processing 58(10), 2010, equation 23): the fewer
    samples there are for the n directions, the more of the target.
    """
    size = len(moment)
    trace = moment.diagonal().sum()
    squares = moment.square().sum()
    spread = (samples + 1 - 2 / size) * (squares - trace.square() / size)
    share = ((1 - 2 / size) * squares + trace.square()) / spread.clamp_min(1e-300)
    share = share.clamp(0, 1)
    if target is None:
        target = torch.eye(size, dtype=moment.dtype, device=moment.device)
    scale = trace / target.diagonal().sum().clamp_min(1e-300)
    return (1 - share) * moment + share * scale * target


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

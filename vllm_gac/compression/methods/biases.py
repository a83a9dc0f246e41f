"""Biased projections as plain ones: W x + b is [W b] times x with a 1 appended.

Statistics of the input of biased q, k and v projections have that 1, too
(compression/statistics_file.py). So whatever a method does to rows of W it does to the bias, and
its errors count the bias.
"""

from collections.abc import Mapping

import torch


def with_bias(weights: Mapping[str, torch.Tensor], linear: str) -> torch.Tensor:
    """The weight of `linear` [out, in]; with a bias [out, in + 1], whose last column it is."""
    weight, bias = weights[f"{linear}.weight"], weights.get(f"{linear}.bias")
    return weight if bias is None else torch.cat((weight, bias.to(weight)[:, None]), 1)


def without_bias(
    weights: Mapping[str, torch.Tensor], linear: str, joined: torch.Tensor
) -> dict[str, torch.Tensor]:
    """The tensors of `linear` of which `joined` is made as by `with_bias`, by their names.

    `weights` say whether the linear has a bias.
    """
    if f"{linear}.bias" not in weights:
        return {f"{linear}.weight": joined}
    return {f"{linear}.weight": joined[:, :-1], f"{linear}.bias": joined[:, -1]}

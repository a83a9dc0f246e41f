"""What a compression method is: what every dim would lose, and the weights of one."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from vllm_gac.layout.dims import LayerLayout, ModelLayout

# How many neighbouring key or value heads a method can merge into one.
MERGEABLE = (1, 2)


@dataclass(frozen=True, slots=True)
class MeasuredLayer:
    """One decoder layer of a dense model with what calibration measured of it.

    `weights` by name within the layer, `covariances` fp64 by the linear whose input they are of
    (see stats.py), `inv_freq` [head_dim / 2] the model's RoPE frequencies, `taylor` [width] the
    scores of its MLP channels by gradients.py, where there are any.
    """

    layout: ModelLayout
    weights: Mapping[str, torch.Tensor]
    covariances: Mapping[str, torch.Tensor]
    inv_freq: torch.Tensor
    taylor: torch.Tensor | None = None


class Compressor(Protocol):
    """One method for one part of a layer. A new one has these members and a line in
    `methods.layer`, which lists them."""

    @property
    def name(self) -> str:
        """The name that its errors are kept under."""

    def full(self, dense: ModelLayout) -> int:
        """The dim at which nothing is lost."""

    def errors(self, layer: MeasuredLayer) -> torch.Tensor:
        """fp64 [full + 1]: the squared error that remains if the dim is 0, 1, ..., full.

        It falls to 0. Its unit is the method's own; sensitivity.py measures what it is worth.
        """

    def compress(self, layer: MeasuredLayer, target: LayerLayout) -> MeasuredLayer:
        """`layer` with its part at the dims of `target`, in fp64; covariances follow.

        Raises PlanError if the method does not lead there.
        """


def tail_sums(energies: torch.Tensor) -> torch.Tensor:
    """[n] energies in the order in which they are kept -> [n + 1] what is left out at 0 ... n."""
    zero = energies.new_zeros(1)
    return torch.cat((energies.flip(0).cumsum(0).flip(0), zero)).clamp_min(0)

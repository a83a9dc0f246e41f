"""What a compression method does: the error of every dim, and the weights for one dim."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from vllm_gac.layout.dims import LayerLayout, ModelLayout

# How many neighbouring key or value heads a method can merge into one.
MERGEABLE = (1, 2)


@dataclass(frozen=True, slots=True)
class MeasuredLayer:
    """One decoder layer of a dense model, and its calibration statistics.

    Attributes:
        layout: The dense model's layout.
        weights: The layer's tensors by their names within the layer.
        covariances: fp64 covariances of the inputs of linear layers, and what else was measured
            (statistics_file.py).
        inv_freq: The model's RoPE frequencies, [head_dim / 2].
        found: What methods have computed of it and need for every dim, by their names.
    """

    layout: ModelLayout
    weights: Mapping[str, torch.Tensor]
    covariances: Mapping[str, torch.Tensor]
    inv_freq: torch.Tensor
    found: dict[str, Any] = field(default_factory=dict, init=False, compare=False)


class Compressor(Protocol):
    """One method for one part of a layer.

    A new method implements these members, and is listed in compress_layer.py.
    """

    @property
    def name(self) -> str:
        """The name of the method in statistics files."""

    def full(self, dense: ModelLayout) -> int:
        """The dim at which nothing is lost."""

    def errors(self, layer: MeasuredLayer) -> torch.Tensor:
        """fp64 [full + 1]: the squared error that is left at the dims 0, 1, ..., full.

        It decreases to 0. Its unit depends on the method; probes.py relates it to the loss.
        """

    def compress(self, layer: MeasuredLayer, target: LayerLayout) -> MeasuredLayer:
        """`layer` with the method's part in the dims of `target`, in fp64, covariances included.

        Raises PlanError if the method cannot make these dims.
        """

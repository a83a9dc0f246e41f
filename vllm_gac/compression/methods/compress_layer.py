"""Compress one decoder layer, given its weights and statistics, to the dims of a plan."""

from collections.abc import Iterator

import torch

from vllm_gac.compression.methods.base import Compressor, MeasuredLayer
from vllm_gac.compression.methods.registry import METHODS, methods_of
from vllm_gac.layout.dims import LayerLayout, ModelLayout


def compress_layer(layer: MeasuredLayer, target: LayerLayout) -> dict[str, torch.Tensor]:
    """The tensors of a layer with the dims of `target`, by their names within the layer.

    Tensors that do not shrink are returned unchanged. The others are fp64, and RoPE tables fp32.
    Raises PlanError if no method makes `target` from the dense layer.
    """
    for compressor in compressors(layer.layout, target):
        layer = compressor.compress(layer, target)
    return dict(layer.weights)


def compressors(dense: ModelLayout, target: LayerLayout) -> Iterator[Compressor]:
    """What makes `target` of a layer of `dense`, in the order of its use."""
    for method in methods_of(METHODS):
        yield from method.making(dense, target)

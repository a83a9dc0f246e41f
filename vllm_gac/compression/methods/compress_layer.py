"""Compress one decoder layer, given its weights and statistics, to the dims of a plan."""

from collections.abc import Iterator, Sequence

import torch

from vllm_gac.compression.methods.base import Compressor, MeasuredLayer
from vllm_gac.compression.methods.heads.keys import Keys
from vllm_gac.compression.methods.heads.values import Values
from vllm_gac.compression.methods.lowrank import LowRank
from vllm_gac.compression.methods.prune import Channels
from vllm_gac.errors import PlanError
from vllm_gac.layout.dims import LINEARS, LayerLayout, ModelLayout


def compress_layer(layer: MeasuredLayer, target: LayerLayout) -> dict[str, torch.Tensor]:
    """The tensors of a layer with the dims of `target`, by their names within the layer.

    Tensors that do not shrink are returned unchanged. The others are fp64, and RoPE tables fp32.
    Raises PlanError if no method makes `target` from the dense layer.
    """
    for compressor in compressors(layer.layout, target):
        layer = compressor.compress(layer, target)
    return dict(layer.weights)


def compressors(dense: ModelLayout, target: LayerLayout) -> Iterator[Compressor]:
    """The methods that make `target`, in the order of their use: factorization is last."""
    heads = dense.num_key_value_heads
    for kind, fewer in (("value", target.value.heads), ("key", target.key.heads)):
        if heads % fewer:
            raise PlanError(f"{fewer} {kind} heads cannot be made of {heads}")
    yield Values(dense.kv_heads_per(target.value))
    yield Keys(target.key.form, dense.kv_heads_per(target.key))
    if not dense.experts:
        yield Channels()
    for linear in LINEARS:
        if linear in target.ranks:
            yield LowRank(linear)


def measurable_methods(
    dense: ModelLayout, methods: Sequence[str], value_group: int
) -> Iterator[Compressor]:
    """The methods whose errors calibration measures, if `methods` has heads, prune or lowrank.

    Up to `value_group` value heads can be merged into one.
    """
    if "heads" in methods:
        for group in sorted({1, value_group}):
            yield Values(group)
            if group == 1 or not dense.qk_norm:
                yield Keys("rotary", group)
                yield Keys("latent", group)
    if "prune" in methods:
        yield Channels()
    if "lowrank" in methods:
        yield from map(LowRank, LINEARS)

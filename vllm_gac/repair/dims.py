"""Which dims a repaired model has."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import TypeAlias

from vllm_gac import contract
from vllm_gac.layout import LayerLayout, ModelLayout
from vllm_gac.schema import Role, Strategy

# An allowed dim not below the one given, for a role.
Align: TypeAlias = Callable[[int, Role], int]


def padded_layout(
    layout: ModelLayout, strategy: Strategy, gpu: str | None = None, tp: int = 1
) -> ModelLayout:
    """`layout` with every dim that compression may choose padded to one that `strategy` allows.

    Head sizes, MLP widths (each of `tp` GPUs' parts by itself) and ranks, never the numbers of
    query, key or value heads: a head of zeros would still be attended with. A rank stays within
    the full rank of its padded linear, which is misaligned only if the hidden size is. Rotary
    keys of another size than the model's heads bring their own RoPE table. Padding twice is
    padding once. Raises ProfileError if `strategy` is measured and there is no profile of `gpu`.
    """
    if strategy == "none":
        return layout
    align = partial(_align, strategy=strategy, gpu=gpu, tp=tp)
    return replace(layout, layers=tuple(_padded(layout, layer, align) for layer in layout.layers))


def _align(dim: int, role: Role, *, strategy: Strategy, gpu: str | None, tp: int) -> int:
    return contract.align(dim, strategy, role, gpu, tensor_parallel_size=tp)


def _padded(layout: ModelLayout, layer: LayerLayout, align: Align) -> LayerLayout:
    key_size = align(layer.key.size, "head")
    grown = key_size != layer.key.size
    rope_table = layer.key.rope_table or (grown and layer.key.form == "rotary")
    padded = replace(
        layer,
        key=replace(layer.key, size=key_size, rope_table=rope_table),
        value=replace(layer.value, size=align(layer.value.size, "head")),
        intermediate_size=align(layer.intermediate_size, "width"),
    )
    ranks = {
        name: min(align(rank, "rank"), *layout.linear_shape(padded, name))
        for name, rank in layer.ranks.items()
    }
    return replace(padded, ranks=MappingProxyType(ranks))

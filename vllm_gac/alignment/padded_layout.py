"""The layout of a model after its dims are padded."""

from dataclasses import replace
from functools import cache, partial
from types import MappingProxyType
from typing import Protocol

from vllm_gac.alignment import rules
from vllm_gac.alignment.rules import NOT_QUANTIZED, QuantizationMultiples
from vllm_gac.layout.dims import LayerLayout, ModelLayout
from vllm_gac.layout.schema import Role, Strategy


class Align(Protocol):
    """Returns the allowed dim of a role for `dim`, which is never below it."""

    def __call__(self, dim: int, *, role: Role, multiple: int) -> int: ...


def padded_layout(
    layout: ModelLayout,
    strategy: Strategy,
    gpu: str | None = None,
    tp: int = 1,
    quantized: QuantizationMultiples = NOT_QUANTIZED,
) -> ModelLayout:
    """`layout` with every dim that compression may choose padded to one that `strategy` allows.

    These dims are head sizes, MLP widths (the part on each of `tp` GPUs is padded by itself) and
    ranks. The numbers of heads do not change, because attention to a head of zeros would change
    the result. A rank never exceeds the full rank of its padded linear, which is misaligned only
    if the hidden size is. Rotary keys whose size differs from the model's heads get their own RoPE
    table. Padding a padded layout changes nothing. `quantized` is how weights and cache will be
    quantized; for the sides of linear layers, all heads on a GPU count together.

    Raises ProfileError if `strategy` is measured and there is no profile of `gpu`.
    """
    if strategy == "none":
        return layout
    # Many layers have the same dims.
    align = cache(partial(rules.align, strategy=strategy, gpu=gpu, tensor_parallel_size=tp))
    layers = tuple(_padded(layout, layer, align, tp, quantized) for layer in layout.layers)
    return replace(layout, layers=layers)


def _padded(
    layout: ModelLayout, layer: LayerLayout, align: Align, tp: int, quantized: QuantizationMultiples
) -> LayerLayout:
    def align_head(size: int, heads: int) -> int:
        return align(size, role="head", multiple=quantized.multiple("head", heads, tp))

    key_size = align_head(layer.key.size, layer.key.heads)
    grown = key_size != layer.key.size
    rope_table = layer.key.rope_table or (grown and layer.key.form == "rotary")
    width = layer.intermediate_size
    if not layout.experts:
        width = align(width, role="width", multiple=quantized.linear)
    padded = replace(
        layer,
        key=replace(layer.key, size=key_size, rope_table=rope_table),
        value=replace(layer.value, size=align_head(layer.value.size, layer.value.heads)),
        intermediate_size=width,
    )
    ranks = {
        name: min(
            align(rank, role="rank", multiple=quantized.linear), *layout.linear_shape(padded, name)
        )
        for name, rank in layer.ranks.items()
    }
    return replace(padded, ranks=MappingProxyType(ranks))

"""The attentions and the ranks that a planner may choose from."""

from collections.abc import Iterator
from dataclasses import replace

from vllm_gac.compression.methods.base import MERGEABLE
from vllm_gac.layout.dims import KeyLayout, LayerLayout, ModelLayout, ValueLayout, breakeven_rank
from vllm_gac.planning.allowed_dims import AllowedDims


def attention_candidates(
    dense: ModelLayout,
    dims: AllowedDims,
    form: str,
    key_group: int | None,
    value_group: int | None,
) -> Iterator[LayerLayout]:
    """Yield the dense layer with each attention that the methods can make.

    There are at least as many key heads as value heads, and the same number of key heads shares
    every value head. Key heads that are normed are not merged: that is not exact.

    Args:
        dense: The dense model.
        dims: The allowed head sizes.
        form: The form of the keys: rotary, latent, or auto for both.
        key_group: How many key heads become one; None for any number.
        value_group: How many value heads become one; None for any number.

    Yields:
        The dense layer with another attention.
    """
    layer, heads, size = dense.layers[0], dense.num_key_value_heads, dense.head_dim
    parallel = dims.tensor_parallel_size
    for merged in MERGEABLE if value_group is None else [value_group]:
        if merged > 1 and heads // merged % parallel:
            continue
        left = heads // merged
        for together in MERGEABLE if key_group is None else [key_group]:
            if dense.qk_norm and together > 1:
                continue
            if heads % merged == 0 and merged % together == 0:
                for key in _keys(dense, dims, form, together):
                    for smaller in dims.up_to(merged * size, "head", left):
                        yield replace(layer, key=key, value=ValueLayout(left, smaller))


def _keys(dense: ModelLayout, dims: AllowedDims, form: str, group: int) -> Iterator[KeyLayout]:
    heads, full = dense.num_key_value_heads // group, dense.head_dim * group
    for size in dims.up_to(full, "head", heads):
        if form in ("auto", "rotary") and size % 2 == 0:
            yield KeyLayout("rotary", heads, size, rope_table=size < full or group > 1)
        if form in ("auto", "latent"):
            yield KeyLayout("latent", heads, size)


def ranks_below_breakeven(
    dense: ModelLayout, layer: LayerLayout, linear: str, dims: AllowedDims
) -> list[int]:
    """The allowed ranks, in rising order, whose factors have fewer parameters than the linear."""
    breakeven = breakeven_rank(dense, layer, linear)
    full = min(dense.linear_shape(layer, linear))
    return [rank for rank in dims.up_to(full, "rank") if rank < breakeven]

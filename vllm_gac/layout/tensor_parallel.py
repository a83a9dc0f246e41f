"""How a layout is split over tensor-parallel GPUs, and which sizes can split it.

Query heads, key heads, value heads and MLP channels are split evenly and in order, so that a query
head stays with its key and value head. If there are fewer key or value heads than GPUs, they are
repeated until each GPU has one: then several GPUs cache the same numbers, as with a dense model.
One factor of a factorized linear is split and the other is whole on every GPU, so any rank works.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from vllm_gac.errors import CheckpointError, PlanError
from vllm_gac.layout.dims import LayerLayout, ModelLayout
from vllm_gac.layout.rounding import ceil_div, round_up

if TYPE_CHECKING:
    import torch

# vLLM pads the vocabulary to a multiple of this before it splits it.
_VOCABULARY_GRANULE = 64
_WIDTH = "intermediate_size"


def splits(layout: ModelLayout, tp: int) -> bool:
    """Whether `tp` GPUs can share every layer of `layout`."""
    return next(_obstacles(layout, tp), None) is None


def check_split(layout: ModelLayout, tp: int, pp: int = 1) -> None:
    """Raise CheckpointError unless `tp` GPUs can share each layer, and `pp` stages the layers.

    The message names the first layer and dim that cannot be split, and the nearest dim that can.
    """
    if pp > len(layout.layers):
        raise CheckpointError(
            f"--pipeline-parallel-size {pp}: the model has {len(layout.layers)} layers and every "
            f"stage needs one; use at most {len(layout.layers)}"
        )
    obstacle = next(_obstacles(layout, tp), None)
    if obstacle is None:
        return
    where, what, dim, nearest = obstacle
    raise CheckpointError(
        f"--tensor-parallel-size {tp}: {where} has {what} = {dim}, which {tp} GPUs cannot share "
        f"evenly; {_sizes(layout, tp)} can share this model, or {tp} can if {what} is {nearest}"
    )


def check_planned_for(dense: ModelLayout, tp: int) -> None:
    """Raise PlanError if `tp` GPUs cannot share the heads of `dense`; a plan never adds heads."""
    for where, what, count, _ in _obstacles(dense, tp):
        if what != _WIDTH:  # the plan chooses a width that can be split, or it is padded
            raise PlanError(
                f"--tp {tp}: {where} has {what} = {count}, which {tp} GPUs cannot share evenly; "
                f"{_sizes(dense, tp)} can share this model"
            )


def repeated_heads(layout: ModelLayout, tp: int) -> ModelLayout:
    """`layout` with key and value heads repeated where there are fewer of them than `tp` GPUs.

    The heads that latent keys are rebuilt to are repeated, too. `layout` must be splittable.
    """
    heads = [(max(x.key.heads, tp), max(x.value.heads, tp)) for x in layout.layers]
    return _with_heads(layout, max(layout.num_key_value_heads, tp), heads)


def of_one_gpu(layout: ModelLayout, layer: LayerLayout, tp: int) -> tuple[ModelLayout, LayerLayout]:
    """`layer` as each of `tp` GPUs computes it, and the model that it then belongs to.

    A width that GPUs cannot share is padded. The layers of that model are as they were.
    """
    if tp == 1:
        return layout, layer
    share = replace(
        layer,
        query_heads=layer.query_heads // tp,
        key=replace(layer.key, heads=ceil_div(layer.key.heads, tp)),
        value=replace(layer.value, heads=ceil_div(layer.value.heads, tp)),
        intermediate_size=ceil_div(layer.intermediate_size, tp),
    )
    heads = layout.num_attention_heads // tp, ceil_div(layout.num_key_value_heads, tp)
    return replace(layout, num_attention_heads=heads[0], num_key_value_heads=heads[1]), share


def with_heads_of(layout: ModelLayout, stored: ModelLayout) -> ModelLayout:
    """`layout` with the head counts of `stored`: the inverse of `repeated_heads`."""
    heads = [(layer.key.heads, layer.value.heads) for layer in stored.layers]
    return _with_heads(layout, stored.num_key_value_heads, heads)


def _with_heads(layout: ModelLayout, dense: int, heads: list[tuple[int, int]]) -> ModelLayout:
    """`layout` with other numbers of KV heads, and of key and value heads of each layer."""
    layers = tuple(
        replace(layer, key=replace(layer.key, heads=keys), value=replace(layer.value, heads=values))
        for layer, (keys, values) in zip(layout.layers, heads, strict=True)
    )
    return replace(layout, num_key_value_heads=dense, layers=layers)


def repeated_tensor(
    before: ModelLayout, after: ModelLayout, name: str, tensor: "torch.Tensor"
) -> "torch.Tensor":
    """Tensor `name` of `before` with its heads repeated as in `after`.

    The two layouts differ in their numbers of key and value heads only. Copies of one head are
    neighbours, because the query heads that use it are. A RoPE table of one row is already shared
    by all heads.
    """
    parts = name.split(".", 4)
    if parts[:2] != ["model", "layers"] or parts[3] != "self_attn":
        return tensor
    index, part = int(parts[2]), parts[4].partition(".")[0]
    old, new = before.layers[index], after.layers[index]
    if part == "k_up_proj":
        old_count, new_count = before.num_key_value_heads, after.num_key_value_heads
        if (old_count, old.key.heads) == (new_count, new.key.heads):
            return tensor
        heads = tensor.reshape(old_count, before.head_dim, -1)
        heads = heads.repeat_interleave(new_count // old_count, 0)
        return heads.reshape(new.key.heads, -1, tensor.shape[-1])
    match part:
        case "q_norm" | "k_norm" if tensor.ndim == 1:
            return tensor
        case "k_proj" | "rope_inv_freq" | "q_norm" | "k_norm":
            old_count, new_count = old.key.heads, new.key.heads
        case "v_proj":
            old_count, new_count = old.value.heads, new.value.heads
        case _:
            return tensor
    shared = parts[4].endswith(".A.weight") or (part == "rope_inv_freq" and len(tensor) == 1)
    if shared or old_count == new_count:
        return tensor
    heads = tensor.reshape(old_count, -1, *tensor.shape[1:])
    return heads.repeat_interleave(new_count // old_count, 0).reshape(-1, *tensor.shape[1:])


def _obstacles(layout: ModelLayout, tp: int) -> Iterator[tuple[str, str, int, int]]:
    """(where, what, dim, nearest dim that works) of every dim that `tp` GPUs cannot share."""
    for index, layer in enumerate(layout.layers):
        for what, dim, nearest in _layer_obstacles(layout, layer, tp):
            yield f"layer {index}", what, dim, nearest
    vocabulary = round_up(layout.vocab_size, _VOCABULARY_GRANULE)
    if vocabulary % tp:
        fitting = _nearest_multiple(vocabulary, tp * _VOCABULARY_GRANULE)
        yield "the model", "vocab_size padded to a multiple of 64", vocabulary, fitting


def _layer_obstacles(
    layout: ModelLayout, layer: LayerLayout, tp: int
) -> Iterator[tuple[str, int, int]]:
    if layer.query_heads % tp:
        yield "query heads", layer.query_heads, _nearest_multiple(layer.query_heads, tp)
    heads = [("key heads", layer.key.heads), ("value heads", layer.value.heads)]
    if layer.key.is_latent:
        heads.append(("heads to rebuild keys for", layout.num_key_value_heads))
    for what, count in heads:
        if count % tp and tp % count:
            fitting = [n for n in range(1, count + tp + 1) if n % tp == 0 or tp % n == 0]
            yield what, count, min(fitting, key=lambda n: abs(n - count))
    width = layer.intermediate_size
    if width % tp:
        yield "moe_" * bool(layout.experts) + _WIDTH, width, round_up(width, 8 * tp)
    if layout.experts and (count := layout.experts.num_experts) < tp:
        yield "num_experts", count, tp


def _sizes(layout: ModelLayout, tp: int) -> str:
    """The numbers of GPUs next to `tp`, below and above, that can share `layout`."""
    max_size = layout.num_attention_heads
    below = next(n for n in range(min(tp, max_size), 0, -1) if splits(layout, n) or n == 1)
    above = next((n for n in range(tp + 1, max_size + 1) if splits(layout, n)), None)
    return f"{below} or {above}" if above else f"at most {below}"


def _nearest_multiple(dim: int, divisor: int) -> int:
    """The multiple of `divisor` nearest to `dim`, at least `divisor`."""
    return max(1, round(dim / divisor)) * divisor

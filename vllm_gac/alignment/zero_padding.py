"""Exact zero padding of a model's tensors. If a dim grows, both tensors that it joins are padded.

    rank            rows of A and columns of B
    rotary keys     each half of every query and key head by itself, because pair f of P pairs is
                    the rows f and f + P; the RoPE table gets frequencies of 0 for padded pairs
                    where keys are normed, the weights of q_norm and k_norm instead: whole heads
                    are projected and normed, and padded pairs get weights of 0
    latent keys     rows of k_proj and columns of k_up_proj; queries have the full width
    values          rows of each value head, and columns of o_proj for each query head
    MLP width       rows of gate_proj and up_proj, columns of down_proj

The padding only adds products of zeros to sums. The softmax scale, which is part of the layout,
does not change.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch.nn.functional import pad

from vllm_gac.layout.dims import LayerLayout, ModelLayout
from vllm_gac.layout.rope import inverse_frequencies
from vllm_gac.layout.schema import RopeParameters

Tensor: TypeAlias = torch.Tensor


@dataclass(frozen=True, slots=True)
class Blocks:
    """One axis of a tensor: `count` blocks of `size`, each of which is padded at its end."""

    count: int
    size: int


def padded_tensors(
    stored: ModelLayout,
    padded: ModelLayout,
    rope: RopeParameters,
    tensors: Iterable[tuple[str, Tensor]],
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the layout `padded`, made from the `tensors` of the layout `stored`.

    The RoPE tables that padded keys need, and that are not stored, come first. Tensors that are not
    part of the model are yielded unchanged.
    """
    known = stored.tensors().keys()
    for index in range(len(stored.layers)):
        if (table := new_table(stored, padded, rope, index)) is not None:
            yield f"model.layers.{index}.self_attn.rope_inv_freq", table
    for name, tensor in tensors:
        yield name, padded_tensor(stored, padded, name, tensor) if name in known else tensor


def new_table(
    stored: ModelLayout, padded: ModelLayout, rope: RopeParameters, index: int
) -> Tensor | None:
    """The RoPE table fp32 [1, pairs] that the padded keys of layer `index` need.

    It has the layer's frequencies, and 0 for padded pairs. None if no table is needed, or if the
    layer has one already.
    """
    if stored.layers[index].key.rope_table or not padded.layers[index].key.rope_table:
        return None
    table = inverse_frequencies(rope, stored.head_dim) * stored.layers[index].has_rope
    return pad(table, (0, padded.layers[index].key.size // 2 - len(table)))[None]


def padded_tensor(stored: ModelLayout, padded: ModelLayout, name: str, tensor: Tensor) -> Tensor:
    """Pad tensor `name` of `stored` with zeros to its shape in `padded` (`ModelLayout.tensors`).

    A RoPE table that all key heads share may have a single row.
    """
    parts = name.split(".", 3)
    if parts[:2] != ["model", "layers"]:
        return tensor
    index, name = int(parts[2]), parts[3]
    if stored.experts and name.startswith("mlp."):
        return tensor
    before = axes(stored, stored.layers[index], name)
    after = axes(padded, padded.layers[index], name)
    if len(before) < len(after):  # a norm that all heads share gets a row for each key head
        tensor = tensor.expand(after[0].size, -1)
        before = after[0], Blocks(2, stored.head_dim // 2)
    for axis, (old, new) in enumerate(zip(before, after, strict=True)):
        tensor = grown(tensor, axis, old, new)
    return tensor


def axes(layout: ModelLayout, layer: LayerLayout, name: str) -> tuple[Blocks, ...]:
    """The axes of tensor `name` of `layer`, e.g. "mlp.down_proj.A.weight"."""
    key = layer.key
    match name.rsplit(".", 2):
        case ["self_attn", "rope_inv_freq"]:
            return Blocks(1, key.heads), Blocks(1, key.size // 2)
        case ["self_attn", "k_up_proj", "weight"]:
            rebuilt = layout.kv_heads_per(key) * layout.head_dim
            return Blocks(1, key.heads), Blocks(1, rebuilt), Blocks(1, key.size)
        case ["self_attn", "q_norm" | "k_norm", "weight"]:
            if not key.rope_table:
                return (Blocks(1, layout.head_dim),)
            return Blocks(1, key.heads), Blocks(2, key.size // 2)
        case [_, "weight"]:  # a norm
            return (Blocks(1, layout.hidden_size),)
        case [linear, "A", "weight"]:
            return Blocks(1, layer.ranks[linear]), linear_axes(layout, layer, linear)[1]
        case [linear, "B", "weight"]:
            return linear_axes(layout, layer, linear)[0], Blocks(1, layer.ranks[linear])
        case [linear, "B", "bias"]:
            return (linear_axes(layout, layer, linear)[0],)
    linear, _, kind = name.rpartition(".")
    rows, columns = linear_axes(layout, layer, linear)
    return (rows,) if kind == "bias" else (rows, columns)


def linear_axes(layout: ModelLayout, layer: LayerLayout, name: str) -> tuple[Blocks, Blocks]:
    """Rows and columns of linear `name` of `layer`, before factorization."""
    hidden, width = Blocks(1, layout.hidden_size), Blocks(1, layer.intermediate_size)
    key, value = layer.key, layer.value
    pairs = (layout.head_dim if layout.qk_norm else key.size) // 2
    match name:
        case "self_attn.q_proj" if key.is_latent:
            return Blocks(layer.query_heads, layout.head_dim), hidden
        case "self_attn.q_proj":
            return Blocks(layer.query_heads * 2, pairs), hidden
        case "self_attn.k_proj" if key.is_latent:
            return Blocks(key.heads, key.size), hidden
        case "self_attn.k_proj":
            return Blocks(key.heads * 2, pairs), hidden
        case "self_attn.v_proj":
            return Blocks(value.heads, value.size), hidden
        case "self_attn.o_proj":
            return hidden, Blocks(layer.query_heads, value.size)
        case "mlp.gate_proj" | "mlp.up_proj":
            return width, hidden
        case "mlp.down_proj":
            return hidden, width
    raise KeyError(name)


def grown(tensor: Tensor, axis: int, old: Blocks, new: Blocks) -> Tensor:
    """Pad each of the blocks `old` along `axis` of `tensor` to the size of the blocks `new`."""
    if old == new:
        return tensor
    before, behind = tensor.shape[:axis], tensor.shape[axis + 1 :]
    blocks = tensor.reshape(*before, old.count, old.size, *behind)
    # F.pad counts axes from the last one.
    grown = pad(blocks, (0, 0) * len(behind) + (0, new.size - old.size))
    return grown.flatten(axis, axis + 1)

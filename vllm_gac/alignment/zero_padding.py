"""Zero padding of a model's tensors, exact: where a role's dim grows, both of its sides do.

    rank            rows of A and columns of B
    rotary keys     each half of every query and key head by itself, for pair f is rows (f, f + P);
                    the RoPE table keeps its frequencies, those of padded pairs turn nothing
    latent keys     rows of k_proj and columns of k_up_proj; queries meet keys at full width
    values          rows of each value head, columns of o_proj of each query head
    MLP width       rows of gate_proj and up_proj, columns of down_proj

The softmax scale belongs to the layout and stays. What is added to a sum is a product of zeros.
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
    """The tensors of `padded`, by name, made of the `tensors` of `stored` as they come.

    First the RoPE tables of those keys that had no need of one before. What is not part of the
    model is passed on as it is.
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
    """The RoPE table fp32 [1, pairs] that padded keys of layer `index` need and none is stored of.

    The model's own frequencies, 0 for the padded pairs. None if nothing is needed.
    """
    if stored.layers[index].key.rope_table or not padded.layers[index].key.rope_table:
        return None
    own = inverse_frequencies(rope, stored.head_dim)
    return pad(own, (0, padded.layers[index].key.size // 2 - len(own)))[None]


def padded_tensor(stored: ModelLayout, padded: ModelLayout, name: str, tensor: Tensor) -> Tensor:
    """Tensor `name` of `stored` with the shape that it has in `padded`; new entries are zero.

    A table that all key heads share may have one row instead of one for each.
    """
    parts = name.split(".", 3)
    if parts[:2] != ["model", "layers"]:
        return tensor
    index, name = int(parts[2]), parts[3]
    before = axes(stored, stored.layers[index], name)
    after = axes(padded, padded.layers[index], name)
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
            group = layout.num_key_value_heads // key.heads
            return Blocks(1, key.heads), Blocks(1, group * layout.head_dim), Blocks(1, key.size)
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
    match name:
        case "self_attn.q_proj" if key.form == "latent":
            return Blocks(layer.query_heads, layout.head_dim), hidden
        case "self_attn.q_proj":
            return Blocks(layer.query_heads * 2, key.size // 2), hidden
        case "self_attn.k_proj" if key.form == "latent":
            return Blocks(key.heads, key.size), hidden
        case "self_attn.k_proj":
            return Blocks(key.heads * 2, key.size // 2), hidden
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
    """`tensor` with blocks `old` along `axis` padded to `new`, which are as many."""
    if old == new:
        return tensor
    before, behind = tensor.shape[:axis], tensor.shape[axis + 1 :]
    blocks = tensor.reshape(*before, old.count, old.size, *behind)
    # F.pad counts axes from the last one.
    grown = pad(blocks, (0, 0) * len(behind) + (0, new.size - old.size))
    return grown.flatten(axis, axis + 1)

"""What stays packed of a quantized model, and what does not.

Keys and values are made smaller by other weights of q, k, v and o. In a layer that changes, these
four are stored in the dtype of the embedding; vLLM needs one type for q, k and v, which it fuses.
"""

import math
from collections.abc import Collection, Mapping
from typing import Any

import torch

from vllm_gac.checkpoint.dtypes import DTYPES
from vllm_gac.checkpoint.open import Checkpoint, TensorReader
from vllm_gac.checkpoint.quantized.formats import Quantization
from vllm_gac.layout.dims import ModelLayout

_ATTENTION = "self_attn."
_LINEARS = tuple(f"{_ATTENTION}{name}_proj" for name in "qkvo")


def with_packed(
    checkpoint: Checkpoint,
    unpacked: Collection[str],
    read: TensorReader,
    index: int,
    made: Mapping[str, torch.Tensor],
) -> Mapping[str, torch.Tensor]:
    """The tensors of new layer `index` as they are stored, by their names within the layer.

    Args:
        checkpoint: The model that it is made of.
        unpacked: What `attention_of_changed` returns.
        read: Reads the tensors of that model.
        index: The layer's number.
        made: Its tensors, none of them packed.
    """
    if checkpoint.quantization is None:
        return made
    prefix, stored = f"model.layers.{index}.", {}
    for name, tensor in made.items():
        if prefix + name in unpacked:
            stored[name] = tensor
            continue
        for part in checkpoint.stored(prefix + name):
            stored[part.removeprefix(prefix)] = read.as_stored(part)
    return stored


def attention_of_changed(dense: ModelLayout, layout: ModelLayout) -> set[str]:
    """The tensors of attention, by their full names, in layers of `layout` with other dims."""
    return {
        name
        for index in _changed(dense, layout)
        for name, _ in layout.layer_tensors(index)
        if f".{_ATTENTION}" in name
    }


def still_packed(
    checkpoint: Checkpoint, quantization: Quantization, layout: ModelLayout
) -> tuple[dict[str, Any], str]:
    """What config.json says of the layers that stay packed, and a sentence about those that do not.

    It says what these take, and what that buys.
    """
    changed, before, after = _changed(checkpoint.layout, layout), 0, 0
    names = [f"model.layers.{index}.{name}" for index in changed for name in _LINEARS]
    unpacked = [name for name in names if f"{name}.weight" in checkpoint.packed]
    shapes = layout.tensors()
    for name in unpacked:
        after += math.prod(shapes[f"{name}.weight"]) * checkpoint.unpacked_dtype.bytes
        for part in checkpoint.stored(f"{name}.weight"):
            info = checkpoint.tensors[part]
            before += math.prod(info.shape) * DTYPES[info.dtype].bytes
    saved = 2 * (checkpoint.layout.kv_elements - layout.kv_elements)
    return quantization.without(unpacked), (
        f"q, k, v and o of {len(changed)} layers are in {checkpoint.unpacked_dtype.torch_name} "
        f"now, and take {(after - before) / 1e6:,.0f} MB more; the cache takes {saved:,} bytes "
        "less for each token (in 16 bits)"
    )


def _changed(dense: ModelLayout, layout: ModelLayout) -> list[int]:
    pairs = zip(dense.layers, layout.layers, strict=True)
    return [index for index, (before, after) in enumerate(pairs) if before != after]

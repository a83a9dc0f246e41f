"""Fused tensors of a dense model, read as the tensors that they consist of.

Phi-4 keeps q, k and v in one tensor, one above the other, and gate and up in another. The rows of a
tensor follow one another in its file, so that each part is a range of bytes of its own. Whoever
reads a part reads that range; nothing is copied.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from vllm_gac.checkpoint.dtypes import DTYPES
from vllm_gac.checkpoint.headers import TensorInfo
from vllm_gac.errors import CheckpointError
from vllm_gac.errors.sanitize import sanitize
from vllm_gac.layout.dims import ModelLayout
from vllm_gac.layout.families import FAMILIES

_PARTS = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}


def without_fused(
    directory: Path, model_type: str, layout: ModelLayout, tensors: Mapping[str, TensorInfo]
) -> Mapping[str, TensorInfo]:
    """`tensors`, with the parts of fused ones in their place if the family has such.

    Args:
        directory: The model directory, for messages.
        model_type: As in config.json.
        layout: The dims of the model, which say where a part ends.
        tensors: What the headers of the files say, by tensor name.

    Raises:
        CheckpointError: A fused tensor has another shape than its parts together, or a dtype that
            is not read; or a part is there by itself, too.
    """
    if not FAMILIES[model_type].fused:
        return tensors
    split = dict(tensors)
    for index, layer in enumerate(layout.layers):
        for fused, parts in _PARTS.items():
            info = split.pop(f"model.layers.{index}.{fused}.weight", None)
            if info is None:
                continue
            where = f"{directory / info.file}: model.layers.{index}.{fused}.weight"
            if info.dtype not in DTYPES:
                raise CheckpointError(f"{where}: dtype {info.dtype} cannot be read")
            shapes = {part: layout.linear_shape(layer, part) for part in parts}
            rows, columns = sum(shape[0] for shape in shapes.values()), layout.hidden_size
            if info.shape != (rows, columns):
                raise CheckpointError(
                    f"{where}: shape {sanitize(list(info.shape))}, expected {[rows, columns]}: "
                    f"{', '.join(f'{shape[0]} rows of {part}' for part, shape in shapes.items())}"
                )
            start = info.start
            for part, shape in shapes.items():
                name = f"model.layers.{index}.{part}.weight"
                if name in split:
                    raise CheckpointError(f"{where}: holds {part}, which is also a tensor")
                split[name] = replace(info, shape=shape, start=start, crc32=None)
                start += shape[0] * columns * DTYPES[info.dtype].bytes
    return split

"""The tensors of the layout, in files that name them otherwise or have fused ones.

The text model in a Mistral Small 3.x or Ministral 3 that reads images, too, is opened as a model of
its own: nothing that is made smaller here is in the vision model.

Phi-4 keeps q, k and v in one tensor, one above the other, and gate and up in another. The rows of a
tensor follow one another in its file, so that each part is a range of bytes of its own. Whoever
reads a part reads that range; nothing is copied.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm_gac.checkpoint.dtypes import DTYPES
from vllm_gac.checkpoint.headers import TensorInfo
from vllm_gac.errors import CheckpointError
from vllm_gac.errors.sanitize import sanitize
from vllm_gac.layout.dims import ModelLayout
from vllm_gac.layout.families import FAMILIES, WITH_VISION

_VISION = re.compile(r"(?:model\.)?(?:vision_tower|multi_modal_projector)\.")
# What names begin with as transformers writes them, and as it did from release 4.52 to 5.
_PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
}
# What Mistral names scales of whole tensors in `fp8`, and what vLLM's linear layers name them.
_SCALES = {".weight_scale_inv": ".weight_scale", ".activation_scale": ".input_scale"}
# Keys that may be beside the text model's own.
_BESIDE = ("dtype", "torch_dtype", "bos_token_id", "eos_token_id", "pad_token_id")
FUSED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}


def text_part(
    directory: Path, raw: Mapping[str, Any], tensors: Mapping[str, TensorInfo]
) -> tuple[Mapping[str, Any], Mapping[str, TensorInfo]]:
    """The config and the tensors of the text model; those of a model without vision as they are.

    Args:
        directory: The model directory, for messages.
        raw: The parsed config.json.
        tensors: What the headers of the files say, by tensor name.

    Returns:
        What config.json would say of the text model alone, and its tensors by their names in it.

    Raises:
        CheckpointError: config.json does not say what the text model is, or one of its tensors is
            there twice.
    """
    if raw.get("model_type") != WITH_VISION:
        return raw, tensors
    text, where = raw.get("text_config"), directory / "config.json"
    if not isinstance(text, Mapping):
        raise CheckpointError(f"{where}: text_config: missing, or not an object")
    section = raw.get("quantization_config") or text.get("quantization_config")
    suffixes = {}
    if isinstance(section, Mapping):
        whole = section.get("quant_method") == "fp8" and not section.get("weight_block_size")
        suffixes, section = _SCALES if whole else {}, _own_modules(section)
    own: dict[str, TensorInfo] = {}
    for name, info in tensors.items():
        if _VISION.match(name):
            continue
        short = _own_name(name)
        for theirs, ours in suffixes.items():
            short = short.removesuffix(theirs) + ours if short.endswith(theirs) else short
        if short in own:
            raise CheckpointError(f"{directory / info.file}: {sanitize(name)}: is there twice")
        own[short] = info
    model_type = text.get("model_type", "mistral")
    family = FAMILIES.get(str(model_type))
    # Engines differ in which of two keys they read, and use a head that is there.
    tied = any(said.get("tie_word_embeddings") is True for said in (raw, text))
    return {
        **{key: raw[key] for key in _BESIDE if key in raw},
        **{key: value for key, value in text.items() if key not in _BESIDE or value is not None},
        "model_type": model_type,
        "architectures": [family.architecture] if family else [],
        "tie_word_embeddings": tied and "lm_head.weight" not in own,
        **({"quantization_config": section} if section else {}),
    }, own


def _own_modules(section: Mapping[str, Any]) -> dict[str, Any]:
    """`quantization_config` with the text model's own names in its lists of modules."""
    return {
        key: [_own_name(f"{name}.").removesuffix(".") for name in value]
        if isinstance(value, list) and all(isinstance(name, str) for name in value)
        else value
        for key, value in section.items()
    }


def _own_name(name: str) -> str:
    for prefix, own in _PREFIXES.items():
        if name.startswith(prefix):
            return own + name.removeprefix(prefix)
    return name


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
        for fused, parts in FUSED.items():
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

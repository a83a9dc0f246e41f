"""The text model in a Mistral Small 3.x or Ministral 3 that reads images, too.

It is opened as a model of its own: nothing that is made smaller here is in the vision model.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_gac.checkpoint.headers import TensorInfo
from vllm_gac.errors import CheckpointError
from vllm_gac.errors.sanitize import sanitize
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

"""The tokenizer and the generation config that were pickled together with a model.

A tokenizer of the tokenizers library is pickled as the JSON of tokenizer.json, and one of
sentencepiece as the bytes of tokenizer.model. Special tokens are attributes of the object.
"""

import json
from collections.abc import Mapping
from typing import Any

from vllm_gac.checkpoint.pickles.values import Instance
from vllm_gac.importers.pickled_model import PickledModel, as_json

_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
_TOKENIZER_KEYS = (
    "model_max_length",
    "clean_up_tokenization_spaces",
    "add_bos_token",
    "add_eos_token",
    "add_prefix_space",
    "legacy",
    "chat_template",
)
_GENERATION_KEYS = (
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "do_sample",
    "temperature",
    "top_p",
    "top_k",
)


def pickled_companions(model: PickledModel) -> dict[str, bytes]:
    """The contents of the files by name; those of a tokenizer only if its kind is known.

    Raises CheckpointError naming the file and the attribute that cannot be written.
    """
    files = {}
    state = _state(model.tokenizer)
    library, pieces = _state(state.get("_tokenizer"), bytes), state.get("sp_model_proto")
    if library:
        files["tokenizer.json"] = library
        files["tokenizer_config.json"] = _tokenizer_config(state, "PreTrainedTokenizerFast", model)
    elif type(pieces) is bytes and pieces:
        files["tokenizer.model"] = pieces
        files["tokenizer_config.json"] = _tokenizer_config(state, "LlamaTokenizer", model)
    generation = _state(_state(model.module).get("generation_config"))
    if kept := _kept(generation, _GENERATION_KEYS, f"{model.path}: generation_config"):
        files["generation_config.json"] = _json(kept)
    return files


def _tokenizer_config(state: Mapping[str, Any], tokenizer_class: str, model: PickledModel) -> bytes:
    given, special = state.get("init_kwargs"), state.get("_special_tokens_map")
    config: dict[str, Any] = {"tokenizer_class": tokenizer_class}
    for source in (given, state):
        if type(source) is dict:
            config |= _kept(source, _TOKENIZER_KEYS, f"{model.path}: its tokenizer")
    for name in _SPECIAL_TOKENS:
        for source, key in ((state, f"_{name}"), (special, name), (given, name)):
            token = source.get(key) if type(source) is dict else None
            text = _state(token).get("content") if type(token) is Instance else token
            if type(text) is str:
                config[name] = as_json(text, f"{model.path}: its tokenizer.{name}")
                break
    return _json(config)


def _kept(values: Mapping[Any, Any], names: tuple[str, ...], where: str) -> dict[str, Any]:
    """The `values` under `names` that are not None, as JSON values."""
    return {
        name: as_json(values[name], f"{where}.{name}")
        for name in names
        if values.get(name) is not None
    }


def _state(value: Any, kind: type = dict) -> Any:
    """The state of an object if it is a `kind`, else an empty `kind`."""
    state = value.state if type(value) is Instance else None
    return state if type(state) is kind else kind()


def _json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()

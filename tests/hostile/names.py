"""Keys and names that are megabytes long, or that control the terminal when printed."""

from collections.abc import Callable
from typing import Any

from tests.hostile.case import Case, bad_config, bad_tensors, written
from tests.hostile.indexes import sends_to
from tests.support.model_files import GAC_LAYERS, Tensors, config, gac_config

_NAMES = {
    "of a megabyte": "x" * (1 << 20),
    "of a megabyte of faces": "\U0001f600" * (1 << 17),
    "that clears the screen": "\x1b[2J\x1b]0;owned\x07",
    "of many lines": "a\nrefused: nothing\r\n\x0b\x0c\x85\u2028",
    "that is written backwards": "\u202etxt.exe",
    "that is half a character": "\ud800",
    "of NUL": "\0",
}


def _layer(**changes: Any) -> dict[str, Any]:
    return gac_config([GAC_LAYERS[0] | changes, GAC_LAYERS[1]])


def _added(name: str) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: ("BF16", (1,))})


def _twice(name: str) -> Case:
    key = "".join(c if c.isalnum() else f"\\u{ord(c):04x}" for c in name)
    return written("config.json", f'{{"{key}": 1, "{key}": 2}}'.encode(), "appears twice")


_PLACES: dict[str, Callable[[str], Case]] = {
    "a key of a layer": lambda name: bad_config(_layer(**{name: 1}), "gac.layers.0"),
    "a linear": lambda name: bad_config(_layer(ranks={name: 8}), "gac.layers.0.ranks"),
    "a value": lambda name: bad_config(config(hidden_size=name), "hidden_size"),
    "an architecture": lambda name: bad_config(config(architectures=[name]), "architectures"),
    "a model type": lambda name: bad_config(config(model_type=name), "model_type"),
    "a RoPE type": lambda name: bad_config(config(rope_scaling={"type": name}), "rope"),
    "a quantizer": lambda name: bad_config(
        config(quantization_config={"quant_method": name}), "quantization_config"
    ),
    "a shard": lambda name: sends_to(name),
    "a PaLU linear": lambda name: bad_config(
        config(model_type="palullama", head_wise_ranks={name: [1]}), "head_wise_ranks"
    ),
    "an SVD-LLM linear": lambda name: bad_config(
        config(model_type="svdllm-llama", svd_ranks={name: 1}), "svd_ranks"
    ),
    "a layer of per_layer_config": lambda name: bad_config(
        config(per_layer_config={name: {}}), "per_layer_config"
    ),
    "a key of per_layer_config": lambda name: bad_config(
        config(per_layer_config={"0": {name: name}}), "per_layer_config"
    ),
    "a key, twice": _twice,
}

CASES: dict[str, Case] = {
    f"{place} {kind}": make(name)
    for place, make in _PLACES.items()
    for kind, name in _NAMES.items()
    if (place, kind) != ("a key, twice", "of a megabyte of faces")  # no escape can write one
} | {
    f"a tensor {kind}": bad_tensors(_added(name), "not part of the model")
    for kind, name in _NAMES.items()
    if kind != "that is half a character"  # safetensors cannot write this name
}

"""Bytes that are no valid JSON, in config.json and in the index."""

import json
from pathlib import Path

from tests.hostile.case import Case, written
from tests.support.model_files import config, write_model

INDEX = "model.safetensors.index.json"

_TEXTS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "not valid JSON"),
    "a list": (b"[]", "expected a JSON object, got list"),
    "null": (b"null", "expected a JSON object"),
    "torn": (json.dumps(config()).encode()[:-9], "not valid JSON"),
    "more after the end": (json.dumps(config()).encode() + b"{}", "not valid JSON"),
    "duplicate keys": (b'{"hidden_size": 32, "hidden_size": 64}', "'hidden_size' appears twice"),
    "NaN": (b'{"rms_norm_eps": NaN}', "NaN is not JSON"),
    "infinity": (b'{"rope_theta": -Infinity}', "-Infinity is not JSON"),
    "1e999": (b'{"rope_theta": 1e999}', "1e999 is too large"),
    "5000 digits": (b'{"hidden_size": ' + b"9" * 5000 + b"}", "not valid JSON"),
    "deep nesting": (b'{"a":' + b"[" * 30_000 + b"]" * 30_000 + b"}", "nested too deeply"),
    "deep nesting of objects": (b'{"a":' * 30_000 + b"1" + b"}" * 30_000, "nested too deeply"),
    "latin-1": (b'{"name": "caf\xe9"}', "not UTF-8 text (byte 13)"),
    "UTF-16": (json.dumps(config()).encode("utf-16"), "not UTF-8"),
    "too large": (b'{"a": "' + b"x" * (4 << 20) + b'"}', "larger than 4194304 bytes"),
    "a million lists": (b'{"a": [' + b"[]," * (1 << 20) + b"[]]}", "more than 65536 values"),
}


def without_config(directory: Path) -> None:
    write_model(directory, config())
    (directory / "config.json").unlink()


def nothing_but_pickles(directory: Path) -> None:
    write_model(directory, config())
    (directory / "model.safetensors").rename(directory / "model.pt")


CASES: dict[str, Case] = {
    "no config.json": Case(without_config, ("there is no config.json",)),
    "nothing but pickles": Case(nothing_but_pickles, ("pytorch_model",)),
    **{f"config.json: {name}": written("config.json", *case) for name, case in _TEXTS.items()},
    **{f"index: {name}": written(INDEX, *case) for name, case in _TEXTS.items()},
}

"""Small directories that stand for far more data. Every reader refuses them quickly."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.hostile.case import Case, bad_config
from tests.hostile.formats import CONFIGS
from tests.support.model_files import config, framed, shard_bytes, tensors_of, write_model
from vllm_gac.checkpoint.headers import MAX_SHARDS, MAX_TENSORS

_LAYERS = 1024
_WIDE: dict[str, Any] = {
    "hidden_size": 2048,
    "vocab_size": 1,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": 1024,
    "num_key_value_heads": 1024,
    "head_dim": 2,
    "intermediate_size": 64,
}
_NO_BLOCK = {"attention": {"no_op": True}, "ffn": {"no_op": True}}
_SKIPPED: dict[str, dict[str, Any]] = {
    "block_configs": {"model_type": "nemotron-nas", "block_configs": [_NO_BLOCK] * _LAYERS},
    "layer lists": {"layer_head_num": [0] * _LAYERS, "layer_inter_size": [0] * _LAYERS},
    "per_layer_config": {
        "per_layer_config": {str(i): {"skip": ["attention", "mlp"]} for i in range(_LAYERS)}
    },
}
_LINEARS = ("q", "k", "v", "o", "gate", "up", "down")
_BASES = {f"num_basis_{x}": 1 for x in _LINEARS}


def model(raw: dict[str, Any]) -> Callable[[Path], object]:
    return lambda directory: write_model(directory, raw)


def shards(count: int, contents: Callable[[int], bytes]) -> Callable[[Path], None]:
    """A valid model with `count` additional shards."""

    def write(directory: Path) -> None:
        write_model(directory, config())
        for number in range(count):
            (directory / f"x{number:05}.safetensors").write_bytes(contents(number))

    return write


def empty_tensors(number: int) -> bytes:
    """A shard of 10,000 tensors that have no elements."""
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    names = (f"{number}.{i}" for i in range(10_000))
    return framed(json.dumps(dict.fromkeys(names, entry), separators=(",", ":")).encode())


def blanks(number: int) -> bytes:
    return framed(b"{}" + b" " * ((4 << 20) - 16))


def hollow(directory: Path) -> None:
    """A model with a sparse file: a terabyte of zeros that take no space on the disk."""
    raw = config(hidden_size=1 << 20, vocab_size=1 << 18, num_hidden_layers=1)
    header: dict[str, Any] = {}
    end = 0
    for name, (dtype, shape) in tensors_of(raw).items():
        start, end = end, end + 2 * int.__mul__(*shape, *(1,) * (2 - len(shape)))
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(raw))
    with (directory / "model.safetensors").open("wb") as file:
        file.write(framed(json.dumps(header).encode()))
        os.truncate(file.fileno(), file.tell() + end)


def groups(*of_each: list[int]) -> dict[str, Any]:
    """A config of Basis Sharing with these groups of layers for every linear."""
    small = {"hidden_size": 2, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 2}
    listed = {f"{x}_groups": list(of_each) for x in _LINEARS}
    return config(**small, num_hidden_layers=_LAYERS, **_BASES, **listed)


def announced(raw: dict[str, Any]) -> Case:
    """A model whose config.json announces far more tensors than there are."""
    return Case(bad_config(raw).write, ("model.embed_tokens.weight", "expected [64, 2]"))


CASES: dict[str, Case] = {
    **{
        f"bomb: skipped layers of {name}": Case(
            model(config(**_WIDE | keys)),
            ("describes 69,126,330,368 parameters", "at most 4 times as many parameters"),
        )
        for name, keys in _SKIPPED.items()
    },
    "bomb: a terabyte in a hole": Case(
        hollow, ("model.safetensors", "are stored, the rest is a hole")
    ),
    "bomb: empty tensors": Case(
        shards(3, empty_tensors), ("x00001.safetensors", f"more than {MAX_TENSORS} tensors")
    ),
    "bomb: shards": Case(
        shards(MAX_SHARDS, lambda _: shard_bytes({})), (f"more than {MAX_SHARDS} shards",)
    ),
    "bomb: headers of blanks": Case(
        shards(5, blanks), ("x00003.safetensors", "16777216 bytes of headers")
    ),
    "bomb: one basis for all layers": announced(groups(list(range(_LAYERS)))),
    "bomb: a basis for each layer": announced(groups(*([i] for i in range(_LAYERS)))),
    "bomb: groups of no layers": bad_config(groups(*([-1] for _ in range(4000))), "q_groups"),
    "bomb: a group of no layers": bad_config(groups([-1] * 9000), "q_groups"),
    "bomb: unknown keys": bad_config(
        CONFIGS["gac"] | {"gac": CONFIGS["gac"]["gac"] | {f"k{i}": 1 for i in range(60_000)}}, "gac"
    ),
    "bomb: more values than a config has": bad_config(
        CONFIGS["layer-lists"] | {"layer_head_num": [-1] * 1_000_000}, "more than 65536 values"
    ),
    "bomb: blocks of nothing": bad_config(
        CONFIGS["block-configs"] | {"block_configs": [1] * 60_000}, "block_configs"
    ),
    "bomb: head groups": bad_config(
        CONFIGS["palu"]
        | {
            "num_attention_heads": 1024,
            "num_key_value_heads": 1024,
            "num_hidden_layers": 60,
            "head_wise_ranks": {
                f"model.layers.{i}.self_attn.k_proj": [1] * 1024 for i in range(60)
            },
        },
        "head_wise_ranks: 61440 groups",
    ),
}

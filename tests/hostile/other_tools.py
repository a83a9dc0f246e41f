"""Directories in the form of other tools with wrong keys in config.json, or wrong tensors."""

import copy
import struct
from collections.abc import Callable
from typing import Any

from tests.hostile.case import Case, bad_config, bad_tensors
from tests.hostile.formats import CONFIGS, written_tensors
from tests.hostile.tensors import added, renamed, without
from tests.support.model_files import config, reshaped, retyped

_Q = "model.layers.0.self_attn.q_proj"
_K = "model.layers.0.self_attn.k_proj"
_DOWN = "model.layers.0.mlp.down_proj"
# The key of config.json that holds the dims, by format.
_KEYS = {
    "palu": "head_wise_ranks",
    "asvd": "truncation_ranks",
    "low-rank": "low_rank_modules",
    "svd-llm": "svd_ranks",
    "lems": "rank_dict",
    "per-layer-config": "per_layer_config",
    "block-configs": "block_configs",
    "layer-lists": "layer_inter_size",
    "basis-sharing": "num_basis_q",
}


def with_key(model: str, value: Any, *says: str) -> Case:
    """A model in the format `model` with `value` under the key of the format."""
    return bad_config(CONFIGS[model] | {_KEYS[model]: value}, *(says or (_KEYS[model],)))


def with_part(model: str, *path: Any, to: Any, says: str) -> Case:
    """A model in which the part at `path` below that key is replaced by `to`."""
    raw = copy.deepcopy(CONFIGS[model])
    part = raw[_KEYS[model]]
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = to
    return bad_config(raw, says)


_WIDTHS: dict[str, Any] = {
    "negative": -1, "true": True, "8.0": 8.0, "'8'": "8", "2**63": 2**63, "a list": [8]
}  # fmt: skip
_NUMBERS: dict[str, Any] = _WIDTHS | {"0": 0, "null": None}
# The formats whose key has a rank for each linear, with where in the key the rank of one is.
_RANKED: dict[str, tuple[str, ...]] = {
    "asvd": (_Q,), "low-rank": (_Q, "rank"), "svd-llm": (_Q,), "lems": (_Q,)
}  # fmt: skip
# What no model of any tool can have.
_IMPOSSIBLE: dict[str, dict[str, Any]] = {
    "a list for a type": {"model_type": ["llama"]},
    "no type": {"model_type": None},
    "another type": {"model_type": "gpt2"},
    "a billion layers": {"num_hidden_layers": 10**9},
    "layers beyond 64 bits": {"num_hidden_layers": 2**70},
    "layers by halves": {"num_hidden_layers": 2.5},
    "no layers": {"num_hidden_layers": 0},
    "a wide bomb": {"hidden_size": 2**62},
    "a vocabulary bomb": {"vocab_size": 10**12},
    "no heads": {"num_attention_heads": 0},
    "heads of text": {"num_attention_heads": "4"},
    "heads that do not divide": {"num_attention_heads": 4, "num_key_value_heads": 3},
    "odd heads": {"head_dim": 15},
    "other RoPE": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
    "another activation": {"hidden_act": "gelu"},
}
_BENT: dict[str, tuple[str, Callable[..., Any], str]] = {
    "palu, VT missing": ("palu", without(f"{_K}.VT.weight"), f"{_K}.VT.weight"),
    "palu, U missing": ("palu", without(f"{_K}.U.1.weight"), f"{_K}.U.1.weight"),
    "palu, U transposed": ("palu", reshaped(f"{_K}.U.0.weight", 5, 16), f"{_K}.U.0.weight"),
    "palu, U of another rank": ("palu", reshaped(f"{_K}.U.0.weight", 16, 6), f"{_K}.U.0.weight"),
    "palu, ranks that do not add up": (
        "palu", reshaped(f"{_K}.VT.weight", 12, 32), f"{_K}.VT.weight"
    ),
    "palu, U in F16": ("palu", retyped(f"{_K}.U.0.weight", "F16"), f"{_K}.U.0.weight"),
    "palu, dense key beside": (
        "palu", renamed(f"{_K}.VT.weight", f"{_K}.weight"), f"{_K}.VT.weight"
    ),
    "palu, a U too many": ("palu", added(f"{_K}.U.2.weight", 16, 5), f"{_K}.U.2.weight"),
    "palu, dense, too": ("palu", added(f"{_K}.weight", 32, 32), f"{_K}.weight"),
    "asvd, rank of the factors": (
        "asvd", reshaped(f"{_DOWN}.BLinear.weight", 41, 48), f"{_DOWN}.BLinear.weight"
    ),
    "lems, without its prefix": (
        "lems",
        renamed("wrapped_model.model.norm.weight", "model.norm.weight"),
        "wrapped_model.model.norm.weight",
    ),
    "basis-sharing, no basis": (
        "basis-sharing",
        without("model.layers.0.self_attn.q_basis.weight"),
        "q_basis.weight",
    ),
    "basis-sharing, a short basis": (
        "basis-sharing", reshaped("model.layers.0.self_attn.q_basis.weight", 5, 32), "q_basis"
    ),
    "basis-sharing, no factor": ("basis-sharing", without(f"{_Q}.weight"), f"{_Q}.weight"),
    "basis-sharing, dense": ("basis-sharing", reshaped(f"{_Q}.weight", 64, 32), f"{_Q}.weight"),
    "per-layer-config, of no layer": (
        "per-layer-config", added("model.layers.2.mlp.up_proj.weight", 24, 32), "layers.2.mlp"
    ),
    "per-layer-config, a wide layer": (
        "per-layer-config", reshaped(f"{_DOWN}.weight", 32, 25), f"{_DOWN}.weight"
    ),
    "flat svd-llm, U alone": (
        "svd-llm-flat", without("model.layers.0.self_attn.q_v_proj.weight"), "q_"
    ),
    "flat svd-llm, a vector": (
        "svd-llm-flat",
        reshaped("model.layers.0.self_attn.q_v_proj.weight", 7 * 32),
        "q_v_proj.weight",
    ),
    "pruned, half a head": (
        "hf-pruned", reshaped(f"{_Q}.weight", 56, 32), f"{_Q}.weight"
    ),
    "pruned, no rows": ("hf-pruned", reshaped(f"{_Q}.weight", 0, 32), f"{_Q}.weight"),
    "pruned, gate and up differ": (
        "hf-pruned",
        reshaped("model.layers.0.mlp.up_proj.weight", 24, 32),
        "model.layers.0.mlp.up_proj.weight",
    ),
    "pruned, no query weights": ("hf-pruned", without(f"{_Q}.weight"), f"{_Q}.weight"),
    "a skipped part that is there": (
        "layer-lists",
        lambda tensors: tensors.update({"model.layers.1.mlp.up_proj.weight": ("BF16", (8, 32))}),
        "model.layers.1.mlp.up_proj.weight",
    ),
}  # fmt: skip

CASES: dict[str, Case] = {
    **{
        f"{model}: its key {name}": with_key(model, value)
        for model in _KEYS
        for name, value in {"a list": [1], "a string": "8", "a number": 8.5}.items()
    },
    **{
        f"{model}: {name}": bad_config(CONFIGS[model] | change)
        for model in _KEYS
        if model != "lems"
        for name, change in _IMPOSSIBLE.items()
    },
    **{
        f"lems: a base with {name}": bad_config(
            CONFIGS["lems"]
            | {"base_config": config() | change}
            | ({"base_model_type": change["model_type"]} if "model_type" in change else {})
        )
        for name, change in _IMPOSSIBLE.items()
    },
    **{
        f"{model}: rank {name}": with_part(model, *path, to=value, says=_Q)
        for model, path in _RANKED.items()
        for name, value in _NUMBERS.items()
    },
    **{
        f"{model}: of no linear, {linear!r}": with_part(
            model, linear, to={"rank": 8} if model == "low-rank" else 8, says=linear
        )
        for model in _RANKED
        for linear in ("model.layers.2.mlp.up_proj", "model.embed_tokens", "")
    },
    **{
        f"{model}: {kind} {name}": bad_tensors(change, name, model=model)
        for model in _RANKED
        for name, (_, shape) in written_tensors(model).items()
        if f"{_Q}." in name
        for kind, change in {
            "no": without(name),
            "transposed": reshaped(name, *reversed(shape)),
        }.items()
    },
    **{
        f"{model}: width {name}": with_part(model, *path, to=value, says=path[-1])
        for model, path in {
            "per-layer-config": ("0", "intermediate_size"),
            "block-configs": (0, "ffn", "intermediate_size"),
        }.items()
        for name, value in (_WIDTHS | {"0": 0}).items()
    },
    **{
        f"layer-lists: width {name}": with_part("layer-lists", 0, to=value, says="layer_inter_size")
        for name, value in _WIDTHS.items()
    },
    **{
        f"basis-sharing: rank {name}": with_key("basis-sharing", value)
        for name, value in _NUMBERS.items()
    },
    **{
        f"palu: rank {name}": with_part("palu", _K, 0, to=value, says=_K)
        for name, value in _NUMBERS.items()
    },
    "palu: three groups": with_part("palu", _K, to=[1, 2, 3], says="3 groups"),
    "palu: no groups": with_part("palu", _K, to=[], says=_K),
    "palu: of no layer": with_part(
        "palu", "model.layers.9.self_attn.k_proj", to=[5, 8], says="layers.9"
    ),
    "palu: a rank for all heads": with_part("palu", _K, to=12, says=_K),
    "palu: of queries": with_part("palu", _Q, to=[7, 5], says="not a k_proj or v_proj"),
    "palu: Qwen2": bad_config(CONFIGS["palu"] | {"model_type": "paluqwen2"}, "'paluqwen2'"),
    "asvd: OPT": bad_config(CONFIGS["asvd"] | {"model_type": "opt"}, "'opt'"),
    "palu: without ranks": bad_config(
        {k: v for k, v in CONFIGS["palu"].items() if k != "head_wise_ranks"}, "head_wise_ranks"
    ),
    "lems: no base": bad_config(CONFIGS["lems"] | {"base_config": None}, "base_config"),
    "lems: a base without dims": bad_config(CONFIGS["lems"] | {"base_config": {}}, "hidden_size"),
    "lems: a base in a base": bad_config(
        CONFIGS["lems"] | {"base_config": CONFIGS["lems"], "base_model_type": "llama"},
        "base_config",
    ),
    "basis-sharing: a layer twice": bad_config(
        CONFIGS["basis-sharing"] | {"q_groups": [[0], [0, 1]]}, "q_groups: 0 appears twice"
    ),
    "basis-sharing: no such layer": bad_config(
        CONFIGS["basis-sharing"] | {"q_groups": [[0, 2]]}, "q_groups: 2 is not a layer"
    ),
    "basis-sharing: a negative layer": bad_config(
        CONFIGS["basis-sharing"] | {"q_groups": [[0, -1]]}, "q_groups.0.1"
    ),
    "basis-sharing: groups a number": bad_config(
        CONFIGS["basis-sharing"] | {"q_groups": 3}, "q_groups"
    ),
    "per-layer-config: no such layer": with_part(
        "per-layer-config", "2", to={}, says="per_layer_config.2"
    ),
    "per-layer-config: a layer twice": with_part(
        "per-layer-config", "00", to={"intermediate_size": 8}, says="layer 0 appears twice"
    ),
    "per-layer-config: odd heads": with_part(
        "per-layer-config", "0", "head_dim", to=7, says="odd 7"
    ),
    **{
        f"per-layer-config: {key} {value!r}": with_part(
            "per-layer-config", "0", key, to=value, says=says
        )
        for key, value, says in (
            ("num_key_value_heads", 3, "layer 0: 3 KV heads cannot be shared evenly"),
            ("num_key_value_heads", 0, "0.num_key_value_heads"),
            ("skip", ["router"], "0.skip.0"),
            ("skip", "mlp", "0.skip"),
            ("sliding_window", 8, "0.sliding_window: cannot differ between layers, got 8"),
        )
    },
    "per-layer-config: a layer by name": with_part(
        "per-layer-config", "x", to={"intermediate_size": 8}, says="per_layer_config.x"
    ),
    "per-layer-config: a layer a number": with_part("per-layer-config", "0", to=8, says="config.0"),
    "per-layer-config: other heads that are normed whole": bad_config(
        CONFIGS["per-layer-config"] | {"model_type": "qwen3", "rope_theta": 1e4},
        "whole heads of 16 are normed",
    ),
    **{
        f"block-configs: {part} {key} {value!r}": with_part(
            "block-configs", 0, part, key, to=value, says=f"{part}.{key}"
        )
        for part, key, value in (
            ("attention", "replace_with_linear", True),
            ("attention", "window_length", 8),
            ("attention", "n_heads_in_group", 3),
            ("attention", "no_op", "no"),
            ("attention", "weights_precision", "nvfp4"),
            ("ffn", "hidden_act", "gelu"),
        )
    },
    "block-configs: half of a block": with_part(
        "block-configs", 0, to={"attention": {}}, says="block_configs.0.ffn"
    ),
    "block-configs: one too few": with_key(
        "block-configs", CONFIGS["block-configs"]["block_configs"][:1], "1 layers"
    ),
    "block-configs: experts": with_part(
        "block-configs", 0, "ffn", to={"moe": {"num_experts": 8}}, says="ffn.moe: not supported"
    ),
    "block-configs: NaN for a width": with_part(
        "block-configs", 0, "ffn", to={"ffn_mult": 1e300}, says="ffn_mult"
    ),
    "layer-lists: one too many": with_key("layer-lists", [24, 0, 8]),
    "layer-lists: heads a number": bad_config(
        CONFIGS["layer-lists"] | {"layer_head_num": 4}, "layer_head_num"
    ),
    "layer-lists: heads of one layer too many": bad_config(
        CONFIGS["layer-lists"] | {"layer_head_num": [2, 4, 4]}, "3 entries for 2 layers"
    ),
    "layer-lists: KV heads that do not divide": bad_config(
        CONFIGS["layer-lists"] | {"layer_head_num": [3, 4], "layer_head_num_kv": [2, 2]},
        "layer 0: 2 KV heads",
    ),
    "layer-lists: more KV heads than heads": bad_config(
        CONFIGS["layer-lists"] | {"num_key_value_heads": 20}, "num_key_value_heads: 20 does not"
    ),
    **{
        f"{case}": bad_tensors(change, name, model=model)
        for case, (model, change, name) in _BENT.items()
    },
    "palu: NaN in a factor": bad_tensors(
        lambda tensors: None,
        "model.safetensors",
        f"{_K}.U.0.weight",
        "contains NaN or infinity",
        model="palu",
        fill={f"{_K}.U.0.weight": struct.pack("<H", 0x7FC1)},
    ),
}

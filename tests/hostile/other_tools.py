"""Directories in the form of other tools with wrong keys in config.json, or wrong tensors."""

import copy
import struct
from collections.abc import Callable
from typing import Any

from tests.hostile.case import Case, bad_config, bad_tensors
from tests.hostile.formats import CONFIGS
from tests.hostile.tensors import renamed, retyped, without
from tests.support.model_files import reshaped

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


_NUMBERS: dict[str, Any] = {
    "0": 0, "negative": -1, "true": True, "8.0": 8.0, "'8'": "8", "null": None, "2**63": 2**63
}  # fmt: skip
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
    "asvd, ALinear missing": ("asvd", without(f"{_Q}.ALinear.weight"), f"{_Q}.ALinear.weight"),
    "asvd, factors exchanged": (
        "asvd", reshaped(f"{_Q}.ALinear.weight", 6, 64), f"{_Q}.ALinear.weight"
    ),
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
        for model in ("palu", "asvd", "low-rank", "svd-llm", "lems")
        for name, value in {"a list": [1], "a string": "8", "a number": 8}.items()
    },
    **{
        f"{model}: rank {name}": with_part(model, _Q, to=value, says=_Q)
        for model in ("asvd", "svd-llm", "lems")
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
    "palu: without ranks": bad_config(
        {k: v for k, v in CONFIGS["palu"].items() if k != "head_wise_ranks"}, "head_wise_ranks"
    ),
    "asvd: of no linear": with_part("asvd", "model.layers.0.mlp.gate", to=8, says="mlp.gate"),
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
    "per-layer-config: no such layer": with_part(
        "per-layer-config", "2", to={}, says="per_layer_config.2"
    ),
    "per-layer-config: a layer twice": with_part(
        "per-layer-config", "00", to={"intermediate_size": 8}, says="layer 0 appears twice"
    ),
    "per-layer-config: odd heads": with_part(
        "per-layer-config", "0", "head_dim", to=7, says="odd 7"
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

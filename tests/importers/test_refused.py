"""Models of other tools with a wrong key in config.json, or a wrong tensor."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.model_files import config, reshaped, write_model
from vllm_gac.steps.verify import verify

Q = "model.layers.0.self_attn.q_proj"
K = "model.layers.0.self_attn.k_proj"
BLOCK: dict[str, Any] = {"attention": {"num_key_value_heads": 2}, "ffn": {"intermediate_size": 48}}


def ranked(rank: Any, linear: str = Q) -> dict[str, Any]:
    return config(architectures=["ASVDLlamaForCausalLM"], truncation_ranks={linear: rank})


def layered(**dims: Any) -> dict[str, Any]:
    return config(per_layer_config={"0": dims})


def blocks(part: str, **changes: Any) -> dict[str, Any]:
    block = BLOCK | {part: BLOCK[part] | changes}
    return config(block_configs=[block, BLOCK])


# What the message names, and the configs that it is about.
CONFIGS: dict[str, list[dict[str, Any]]] = {
    Q: [ranked(bad) for bad in (0, -1, True, "8", None, [8])],
    "layers.9": [ranked(8, "model.layers.9.self_attn.k_proj")],
    "embed_tokens": [ranked(8, "model.embed_tokens")],
    "num_hidden_layers": [ranked(8) | {"num_hidden_layers": 10**9}],
    "intermediate_size": [layered(intermediate_size=-1), layered(intermediate_size="8"),
                          blocks("ffn", intermediate_size=-1)],
    "layer 0": [layered(num_key_value_heads=3)],
    "0.head_dim": [layered(head_dim=8)],
    "0.skip": [layered(skip="mlp"), layered(skip=["router"])],
    "per_layer_config.2": [config(per_layer_config={"2": {}})],
    "replace_with_linear": [blocks("attention", replace_with_linear=True)],
    "n_heads_in_group": [blocks("attention", n_heads_in_group=2)],
    "hidden_act": [blocks("ffn", hidden_act="gelu")],
    "ffn.moe": [blocks("ffn", moe={"num_experts": 8})],
}  # fmt: skip


@pytest.mark.parametrize("named", CONFIGS)
def test_invalid_keys_are_named(named: str, tmp_path: Path) -> None:
    for raw in CONFIGS[named]:
        write_model(tmp_path, config())
        (tmp_path / "config.json").write_text(json.dumps(raw))
        assert named in "\n".join(verify(tmp_path).faults), raw


# By case: the config, a tensor, and a shape that it cannot have; None: it is missing.
TENSORS: dict[str, tuple[dict[str, Any], str, tuple[int, ...] | None]] = {
    "asvd without a factor": (ranked(8), f"{Q}.ALinear.weight", None),
    "asvd, another rank": (ranked(8), f"{Q}.BLinear.weight", (9, 32)),
    "a wide layer": (layered(intermediate_size=24), "model.layers.0.mlp.up_proj.weight", (25, 32)),
}


@pytest.mark.parametrize("case", TENSORS)
def test_invalid_tensors_are_named(case: str, tmp_path: Path) -> None:
    raw, name, shape = TENSORS[case]
    change = reshaped(name, *shape) if shape else lambda tensors: tensors.pop(name)
    write_model(tmp_path, raw, change)
    assert any(name in fault for fault in verify(tmp_path).faults)

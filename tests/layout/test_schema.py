"""Configs that the schema accepts, and configs that it refuses."""

from typing import Any

import pytest

from tests.support.model_files import GAC_LAYERS, config, gac_config
from vllm_gac.errors import CheckpointError
from vllm_gac.layout.dims import layout_of
from vllm_gac.layout.schema import HfConfig, validate


def hf(**changes: Any) -> HfConfig:
    return validate(HfConfig, config(**changes), "config.json")


def without(raw: dict[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in raw.items() if key not in names}


def test_missing_and_null_heads_default_to_what_transformers_derives() -> None:
    null = config(num_key_value_heads=None, head_dim=None, rope_scaling=None, sliding_window=None)
    for raw in (null, without(config(), "num_key_value_heads", "head_dim")):
        read = validate(HfConfig, raw, "config.json")
        assert (read.num_key_value_heads, read.head_dim) == (4, 8)


LINEAR = {"factor": 2.0, "rope_theta": 5e5}


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": {"rope_type": "linear", **LINEAR}},
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 5e5},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_theta": 500000},
    ],
)
def test_rope_is_read_in_each_of_its_spellings(changes: dict[str, Any]) -> None:
    rope = hf(**changes).rope
    assert (rope.rope_type, rope.factor, rope.rope_theta) == ("linear", 2.0, 5e5)


@pytest.mark.parametrize(
    ("family", "heads"), [("mistral", 16), ("qwen2", 64), ("qwen3", 64), ("phi3", 40)]
)
def test_what_a_family_leaves_out_is_what_transformers_fills_in(family: str, heads: int) -> None:
    mapping = pytest.importorskip("transformers").CONFIG_MAPPING

    names = ["max_position_embeddings", "num_key_value_heads", "sliding_window"]
    names += ["head_dim"] if family == "qwen3" else []
    changes = {"model_type": family, "num_attention_heads": heads, "rope_theta": 1e6}
    raw = without(config(**changes), *names)
    read, filled = validate(HfConfig, raw, "config.json"), mapping[family].from_dict(raw)
    assert [getattr(read, name) for name in names] == [getattr(filled, name) for name in names]


def test_a_qwen2_says_the_base_of_its_rope_because_engines_differ() -> None:
    with pytest.raises(CheckpointError, match="rope_theta"):
        hf(model_type="qwen2")


def test_architectures_may_be_missing_where_vllm_guesses_right() -> None:
    assert validate(HfConfig, without(config(), "architectures"), "config.json").gac is None
    with pytest.raises(CheckpointError, match="architectures"):
        validate(HfConfig, without(gac_config(), "architectures"), "config.json")


def test_the_first_of_many_faults_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"hidden_size: .*\b1 more"):
        hf(hidden_size=0, vocab_size=0)


def layer(number: int, **changes: Any) -> dict[str, Any]:
    """A compressed model with changes in one layer; those of an object are added to it."""
    layers: list[dict[str, Any]] = [dict(one) for one in GAC_LAYERS]
    for key, value in changes.items():
        old = layers[number].get(key)
        layers[number][key] = old | value if isinstance(old, dict) else value
    return gac_config(layers)


# By case: the config, and what the message names.
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a layer too few": (gac_config(GAC_LAYERS[:1]), "gac.layers"),
    "a layer too many": (gac_config([*GAC_LAYERS, GAC_LAYERS[0]]), "gac.layers"),
    "a rank above full": (layer(0, ranks={"mlp.down_proj": 33}), "rank 33"),
    "a rank of no linear": (layer(0, ranks={"mlp.gate": 8}), "gac.layers.0.ranks.mlp.gate"),
    "an unknown key": (layer(0, rank={}), "gac.layers.0.rank"),
    "an unknown form": (layer(0, key={"form": "absolute"}), "gac.layers.0.key.form"),
    "an odd key size": (layer(0, key={"size": 11}), "odd 11"),
    "a huge key size": (layer(0, key={"size": 10**9}), "gac.layers.0.key.size"),
    "key heads that do not divide": (layer(0, key={"heads": 3}), "gac.layers.0.key.heads"),
    "value heads that do not divide": (layer(0, value={"heads": 3}), "gac.layers.0.value.heads"),
    "no RoPE table": (layer(0, rope_table=False), "gac.layers.0.rope_table"),
    "a RoPE table of latent keys": (layer(1, rope_table=True), "gac.layers.1.rope_table"),
    "another version": (
        gac_config() | {"gac": gac_config()["gac"] | {"version": 2}},
        "format version 1",
    ),
    "a tiny softmax scale": (
        gac_config() | {"gac": gac_config()["gac"] | {"softmax_scale": 1e-300}},
        "softmax_scale",
    ),
    "gac under a dense name": (gac_config() | {"architectures": ["LlamaForCausalLM"]}, "gac"),
    "gac under Mistral's name": (
        gac_config() | {"architectures": ["MistralForCausalLM"], "model_type": "mistral"},
        "architectures",
    ),
    "dense under gac's name": (config(architectures=["GacLlamaForCausalLM"]), "gac"),
    "a dtype that torch lacks": (config(dtype="torch.bfloat16"), "dtype"),
    "the same by its old key": (without(config(torch_dtype=[]), "dtype"), "dtype"),
    "a huge hidden size": (config(hidden_size=10**9), "hidden_size"),
    "a billion layers": (config(num_hidden_layers=10**9), "num_hidden_layers"),
    "no hidden size": (without(config(), "hidden_size"), "hidden_size"),
    "KV heads that do not divide": (config(num_key_value_heads=3), "num_key_value_heads"),
    "an odd head size": (config(head_dim=15), "odd 15"),
    "another model type": (config(model_type="gpt2"), "model_type"),
    "another architecture": (config(architectures=["LlamaForQuestionAnswering"]), "architectures"),
    "another activation": (config(hidden_act="gelu"), "hidden_act"),
    "dynamic RoPE": (config(rope_scaling={"rope_type": "dynamic", "factor": 4.0}), "rope_type"),
    "RoPE by layer type": (config(rope_parameters={"full_attention": {}}), "layer type"),
    "incomplete llama3 RoPE": (
        config(rope_scaling={"rope_type": "llama3", "factor": 8.0}),
        "high_freq_factor, low_freq_factor, original_max_position_embeddings",
    ),
    "two types of RoPE": (
        config(rope_scaling={"type": "linear", "rope_type": "default", "factor": 2.0}),
        "rope_type",
    ),
    "partial rotation": (config(partial_rotary_factor=0.5), "partial_rotary_factor"),
    "a tiny theta": (config(rope_theta=1e-300), "rope_theta"),
    "a huge factor": (
        config(rope_scaling={"rope_type": "linear", "factor": 1e300}),
        "factor",
    ),
    "too many positions": (config(max_position_embeddings=1 << 30), "max_position_embeddings"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_invalid_configs_are_refused_by_key(case: str) -> None:
    raw, named = REFUSED[case]
    with pytest.raises(CheckpointError) as refused:
        layout_of(raw)
    assert named in str(refused.value)

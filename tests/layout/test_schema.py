"""Configs that the schema accepts. Those that it refuses are in tests/hostile."""

from typing import Any

import pytest

from tests.support.model_files import config, gac_config
from vllm_gac.errors import CheckpointError
from vllm_gac.layout.schema import HfConfig, validate


def hf(**changes: Any) -> HfConfig:
    return validate(HfConfig, config(**changes), "config.json")


def without(raw: dict[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in raw.items() if key not in names}


def test_kv_heads_and_head_size_default_to_what_transformers_derives() -> None:
    read = validate(HfConfig, without(config(), "num_key_value_heads", "head_dim"), "config.json")
    assert (read.num_key_value_heads, read.head_dim) == (4, 8)


def test_null_means_not_given() -> None:
    read = hf(num_key_value_heads=None, head_dim=None, rope_scaling=None, sliding_window=None)
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


@pytest.mark.parametrize(("family", "heads"), [("mistral", 16), ("qwen2", 64), ("qwen3", 64)])
def test_what_a_family_leaves_out_is_what_transformers_fills_in(family: str, heads: int) -> None:
    from transformers import CONFIG_MAPPING

    names = ["max_position_embeddings", "num_key_value_heads", "sliding_window"]
    names += ["head_dim"] if family == "qwen3" else []
    changes = {"model_type": family, "num_attention_heads": heads, "rope_theta": 1e6}
    raw = without(config(**changes), *names)
    read, filled = validate(HfConfig, raw, "config.json"), CONFIG_MAPPING[family].from_dict(raw)
    assert [getattr(read, name) for name in names] == [getattr(filled, name) for name in names]


def test_null_is_no_window_even_where_a_missing_key_is_one() -> None:
    assert hf(model_type="mistral", sliding_window=None).sliding_window is None


def test_a_qwen2_says_the_base_of_its_rope_because_engines_differ() -> None:
    with pytest.raises(CheckpointError, match=r"rope_theta: missing; for a Qwen2 transformers"):
        hf(model_type="qwen2")


def test_architectures_may_be_missing_where_vllm_guesses_right() -> None:
    assert validate(HfConfig, without(config(), "architectures"), "config.json").gac is None
    with pytest.raises(CheckpointError, match=r"architectures are \[\], but there is a \"gac\""):
        validate(HfConfig, without(gac_config(), "architectures"), "config.json")


def test_of_many_faults_the_first_is_told_and_the_rest_counted() -> None:
    with pytest.raises(CheckpointError, match=r"hidden_size: .* \(and 1 more faults\)"):
        hf(hidden_size=0, vocab_size=0)


def test_a_long_value_is_not_repeated_in_full() -> None:
    with pytest.raises(CheckpointError) as refused:
        hf(hidden_size="x" * 10_000)
    assert len(str(refused.value)) < 200

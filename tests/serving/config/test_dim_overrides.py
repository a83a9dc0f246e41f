"""Dims of a gac model that --hf-overrides changes."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs

from tests.serving.models import HETEROGENEOUS, write_model
from vllm_gac.errors import CheckpointError
from vllm_gac.layout.schema import HfConfig
from vllm_gac.serving.config.dim_overrides import FIXED, check_dims
from vllm_gac.serving.config.parser import GacConfigParser

# What a model may be served with other than it was trained with, or what changes no answer.
FREE = {"max_position_embeddings", "rms_norm_eps", "sliding_window", "rope"}
# Refused by the schema or by vllm_gac.serving.config.foreign_code, whatever else they become.
NAMES = {"model_type", "architectures", "hidden_act"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("overridden") / "model"
    write_model(directory, [HETEROGENEOUS[0], HETEROGENEOUS[5]])
    return directory


def checked(directory: Path, overrides: dict[str, Any]) -> None:
    """As vLLM reads the config, overrides it and calls the hook."""
    _, hf_config = GacConfigParser().parse(directory, trust_remote_code=False)
    hf_config.update(overrides)
    check_dims(hf_config)


def test_of_every_key_that_is_read_it_is_known_whether_it_is_fixed() -> None:
    assert set(HfConfig.model_fields) == {*FIXED} | FREE | NAMES


@pytest.mark.parametrize("key", FIXED)
def test_a_dim_that_is_changed_is_refused_by_name(key: str, model: Path) -> None:
    _, hf_config = GacConfigParser().parse(model, trust_remote_code=False)
    before = hf_config.to_dict()[key]
    after = before | {"softmax_scale": 1.0} if key == "gac" else not before
    if type(before) is int:
        after = 2 * before
    with pytest.raises(CheckpointError, match=f"^--hf-overrides: changes {key}[ ,]"):
        checked(model, {key: after})


def test_overrides_that_change_nothing_or_other_things_pass(model: Path) -> None:
    raw = json.loads((model / "config.json").read_text())
    for overrides in (
        {},
        {"num_key_value_heads": raw["num_key_value_heads"], "gac": raw["gac"]},
        {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    ):
        checked(model, overrides)


@pytest.mark.parametrize("by_function", [False, True])
def test_vllm_itself_refuses_before_an_engine_is_started(by_function: bool, model: Path) -> None:
    overrides: Any = {"num_key_value_heads": 8}
    if by_function:
        overrides = more_heads
    arguments = EngineArgs(model=str(model), skip_tokenizer_init=True, hf_overrides=overrides)
    with pytest.raises(
        ValueError, match=r"--hf-overrides: changes num_key_value_heads from 4 to 8"
    ):
        arguments.create_model_config()
    dataclasses.replace(arguments, hf_overrides={}).create_model_config()


def more_heads(hf_config: Any) -> Any:
    """An override as users of Python may write it."""
    hf_config.num_key_value_heads = 8
    return hf_config

"""--hf-overrides must not change the dims of a gac model."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs

from tests.serving.models import HETEROGENEOUS, write_model
from tests.support.dense_models import config
from vllm_gac.errors import CheckpointError
from vllm_gac.layout.dims import layout_of
from vllm_gac.layout.schema import HfConfig
from vllm_gac.serving.config.overrides import FIXED, FIXED_OF_EXPERTS, resolve_overrides
from vllm_gac.serving.config.parser import GacConfigParser
from vllm_gac.serving.gac_config import GacConfig

# Keys that users may change, or that change no answer.
FREE = {"max_position_embeddings", "rms_norm_eps", "sliding_window", "rope", "experts"}
# Any other value is refused by the schema or by vllm_gac.serving.config.foreign_code.
NAMES = {"model_type", "architectures", "hidden_act"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("overridden") / "model"
    write_model(directory, [HETEROGENEOUS[0], HETEROGENEOUS[5]])
    return directory


def checked(directory: Path, overrides: dict[str, Any]) -> None:
    """Read the config, override it and check it, as vLLM and the hook do."""
    _, hf_config = GacConfigParser().parse(directory, trust_remote_code=False)
    hf_config.update(overrides)
    resolve_overrides(GacConfig.of(hf_config))


def test_every_key_of_the_schema_is_fixed_free_or_a_name() -> None:
    assert set(HfConfig.model_fields) == {*FIXED} | FREE | NAMES


@pytest.mark.parametrize("key", FIXED)
def test_a_changed_dim_is_refused_by_name(key: str, model: Path) -> None:
    _, hf_config = GacConfigParser().parse(model, trust_remote_code=False)
    before = hf_config.to_dict()[key]
    after = before | {"softmax_scale": 1.0} if key == "gac" else not before
    if type(before) is int:
        after = 2 * before
    with pytest.raises(CheckpointError, match=f"^--hf-overrides: .*{key}"):
        checked(model, {key: after})


@pytest.mark.parametrize("key", FIXED_OF_EXPERTS)
def test_so_is_one_of_experts(key: str, tmp_path: Path) -> None:
    raw = config(model_type="qwen3_moe", architectures=["Qwen3MoeForCausalLM"])
    raw |= {"gac": layout_of(raw).section(), "architectures": ["GacLlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    checked(tmp_path, {"num_experts_per_tok": 2})
    with pytest.raises(CheckpointError, match=r"^--hf-overrides: .*(moe_int|num_)"):
        checked(tmp_path, {key: 16})


def test_overrides_that_change_no_dim_pass(model: Path) -> None:
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
    with pytest.raises(ValueError, match=r"--hf-overrides: .*num_key_value_heads"):
        arguments.create_model_config()
    dataclasses.replace(arguments, hf_overrides={}).create_model_config()


def more_heads(hf_config: Any) -> Any:
    """An override as a function, which vLLM's Python API allows."""
    hf_config.num_key_value_heads = 8
    return hf_config

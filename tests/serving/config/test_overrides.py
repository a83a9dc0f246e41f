"""--hf-overrides: dims stay, changes of windows and RoPE reach every layer, or all is refused."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import pad
from vllm.engine.arg_utils import EngineArgs
from vllm.transformers_utils.config import patch_rope_parameters

from tests.serving.models import HETEROGENEOUS, write_model
from tests.serving.stubs import stream
from tests.support.dense_models import YARN_ROPE, change_config, config
from tests.support.stored_models import change_tensors
from vllm_gac.errors import CheckpointError
from vllm_gac.layout.dims import layout_of
from vllm_gac.layout.rope import inverse_frequencies
from vllm_gac.layout.schema import HfConfig, RopeParameters
from vllm_gac.serving.config.overrides import FIXED, FIXED_OF_EXPERTS, resolve_overrides
from vllm_gac.serving.config.parser import GacConfigParser
from vllm_gac.serving.gac_config import GacConfig
from vllm_gac.steps.verify import verify

# Keys that users may change, or that change no answer.
FREE = {"dtype", "max_position_embeddings", "rms_norm_eps", "sliding_window", "rope", "experts"}
FREE |= {"eos_token_id", "use_cache"}
# Any other value is refused by the schema or by vllm_gac.serving.config.foreign_code.
NAMES = {"model_type", "architectures", "hidden_act"}

WITHOUT_TABLES = [HETEROGENEOUS[0], HETEROGENEOUS[5]]  # a dense layer, and one with latent keys
QWEN2: dict[str, Any] = {"model_type": "qwen2", "sliding_window": 45, "max_window_layers": 0}
CONFIGS: dict[str, dict[str, Any]] = {
    "on": QWEN2 | {"use_sliding_window": True},
    "off": QWEN2 | {"use_sliding_window": False},
    "mistral": {"model_type": "mistral", "sliding_window": 45},
    "llama": {"model_type": "llama"},
    "smollm3": {"model_type": "smollm3"},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models with these configs, and two layers of three with tables of frequencies in "tables"."""
    directory = tmp_path_factory.mktemp("overridden")
    for name, changes in CONFIGS.items():
        write_model(directory / name, WITHOUT_TABLES, **changes)
    write_model(directory / "tables", HETEROGENEOUS[:3])
    return directory


def overridden(directory: Path, overrides: dict[str, Any]) -> GacConfig:
    """The config as vLLM reads and overrides it."""
    _, hf_config = GacConfigParser().parse(directory, trust_remote_code=False)
    hf_config.update(overrides)
    patch_rope_parameters(hf_config)
    return GacConfig.of(hf_config)


def check(directory: Path, overrides: dict[str, Any]) -> GacConfig:
    """Override the config and check it, as vLLM and the hook do, which may run twice."""
    hf_config = overridden(directory, overrides)
    resolve_overrides(hf_config)
    resolve_overrides(hf_config)
    return hf_config


def test_every_key_of_the_schema_is_fixed_free_or_a_name() -> None:
    assert set(HfConfig.model_fields) == {*FIXED} | FREE | NAMES


@pytest.mark.parametrize("key", FIXED)
def test_a_changed_dim_is_refused_by_name(key: str, models: Path) -> None:
    before = overridden(models / "llama", {}).to_dict()[key]
    after = before | {"softmax_scale": 1.0} if key == "gac" else not before
    if type(before) is int:
        after = 2 * before
    with pytest.raises(CheckpointError, match=f"^--hf-overrides: .*{key}"):
        check(models / "llama", {key: after})


@pytest.mark.parametrize("key", FIXED_OF_EXPERTS)
def test_a_changed_dim_of_experts_is_refused(key: str, tmp_path: Path) -> None:
    raw = config(model_type="qwen3_moe", architectures=["Qwen3MoeForCausalLM"])
    raw |= {"gac": layout_of(raw).section(), "architectures": ["GacLlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    check(tmp_path, {"num_experts_per_tok": 2})
    with pytest.raises(CheckpointError, match=r"^--hf-overrides: .*(moe_int|num_)"):
        check(tmp_path, {key: 16})


def test_overrides_that_change_nothing_fixed_pass(models: Path) -> None:
    raw = json.loads((models / "tables" / "config.json").read_text())
    for overrides in (
        {},
        {"num_key_value_heads": raw["num_key_value_heads"], "gac": raw["gac"]},
        {"max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000}},
        {"rope_theta": 1e4},
    ):
        check(models / "tables", overrides)


def more_heads(hf_config: Any) -> Any:
    """An override as a function, which vLLM's Python API allows."""
    hf_config.num_key_value_heads = 8
    return hf_config


@pytest.mark.parametrize("overrides", [{"num_key_value_heads": 8}, more_heads])
def test_create_model_config_refuses_a_changed_dim(overrides: Any, models: Path) -> None:
    model = str(models / "llama")
    arguments = EngineArgs(model=model, skip_tokenizer_init=True, hf_overrides=overrides)
    with pytest.raises(ValueError, match=r"--hf-overrides: .*num_key_value_heads"):
        arguments.create_model_config()
    dataclasses.replace(arguments, hf_overrides={}).create_model_config()


# ---- windows ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "overrides", "expected"),
    [
        ("on", {}, 45),
        ("on", {"sliding_window": None}, None),  # --disable-sliding-window arrives like this, too
        ("on", {"sliding_window": None, "use_sliding_window": False}, None),
        ("off", {}, None),
        ("off", {"use_sliding_window": False}, None),
        ("mistral", {}, 45),
        ("mistral", {"sliding_window": None}, None),
    ],
)
def test_the_window_that_vllm_honours_is_served(
    model: str, overrides: dict[str, Any], expected: int | None, models: Path
) -> None:
    hf_config = check(models / model, overrides)
    kinds = getattr(hf_config, "layer_types", None)
    all_windowed = kinds is None or set(kinds) == {"sliding_attention"}  # the rule of arg_utils
    assert (hf_config.sliding_window if all_windowed else None) == expected


@pytest.mark.parametrize(
    ("model", "overrides", "named"),
    [
        ("off", {"use_sliding_window": True}, "use_sliding_window"),
        ("on", {"use_sliding_window": False}, "sliding_window"),
        ("on", {"max_window_layers": 1}, "max_window_layers"),
        ("on", {"layer_types": ["full_attention"] * 2}, "layer_types"),
        ("off", {"sliding_window": 45}, "sliding_window .*45"),
        ("mistral", {"sliding_window": 64}, "sliding_window .*64"),
        ("mistral", {"use_sliding_window": False}, "use_sliding_window"),
        ("llama", {"sliding_window": 64}, "sliding_window .*64"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act"),
        ("smollm3", {"no_rope_layers": [0, 1]}, "RoPE"),
    ],
)
def test_overrides_that_vllm_ignores_are_refused(
    model: str, overrides: dict[str, Any], named: str, models: Path
) -> None:
    with pytest.raises(CheckpointError, match=f"^--hf-overrides: .*{named}"):
        check(models / model, overrides)


# ---- RoPE ------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["tables", "llama"])
@pytest.mark.parametrize(
    "overrides",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"rope_scaling": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
        {"rope_parameters": YARN_ROPE},
        {"rope_theta": 5e5},
    ],
)
def test_another_rope_is_refused(model: str, overrides: dict[str, Any], models: Path) -> None:
    with pytest.raises(CheckpointError, match=r"--hf-overrides: .*(RoPE|rope_theta)"):
        check(models / model, overrides)


@pytest.mark.parametrize("edited", [{"rope_theta": 5e5}, {"no_rope_layers": [1, 1, 0]}])
@pytest.mark.parametrize(("source", "ours"), [({"tool": "vllm-gac 0.1"}, True), ({}, False)])
def test_rope_edited_in_a_compressed_models_config_is_refused(
    edited: dict[str, Any], source: dict[str, str], ours: bool, tmp_path: Path
) -> None:
    """Its tables hold every other frequency of its config.json; other tools may choose any."""
    layout = write_model(tmp_path, HETEROGENEOUS[:3], model_type="smollm3")
    frequencies = inverse_frequencies(RopeParameters(rope_theta=1e4), layout.head_dim)[::2]

    def set_tables(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            if name.endswith("rope_inv_freq"):
                table = frequencies[: tensor.shape[1]]
                tensors[name] = pad(table, (0, tensor.shape[1] - len(table)))[None]

    change_tensors(tmp_path / "model.safetensors", set_tables)
    change_config(tmp_path, gac=layout.section() | {"source": source})
    assert dict(stream(tmp_path)).keys() == layout.tensors().keys()
    change_config(tmp_path, **edited)
    if ours:
        with pytest.raises(CheckpointError, match="rope_inv_freq"):
            dict(stream(tmp_path))
        assert "rope_inv_freq: " in verify(tmp_path).faults[0]
    else:
        dict(stream(tmp_path))

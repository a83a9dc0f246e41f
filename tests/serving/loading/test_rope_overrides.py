"""Changes of RoPE are refused for models whose layers have frequencies of their own."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import pad
from vllm.transformers_utils.config import patch_rope_parameters

from tests.serving.models import HETEROGENEOUS, write_model
from tests.serving.stubs import ModelConfigStub, stream
from tests.support.dense_models import YARN_ROPE
from vllm_gac.errors import CheckpointError
from vllm_gac.layout.rope import inverse_frequencies
from vllm_gac.layout.schema import RopeParameters
from vllm_gac.serving.config.overrides import resolve_overrides
from vllm_gac.serving.config.parser import GacConfigParser
from vllm_gac.serving.gac_config import GacConfig
from vllm_gac.steps.verify import verify

WITHOUT_TABLES = [HETEROGENEOUS[0], HETEROGENEOUS[5]]  # a dense layer, and one with latent keys


def overridden(directory: Path, overrides: dict[str, Any]) -> GacConfig:
    """The config as vLLM reads and overrides it."""
    _, hf_config = GacConfigParser().parse(directory, trust_remote_code=False)
    hf_config.update(overrides)
    patch_rope_parameters(hf_config)
    return GacConfig.of(hf_config)


@pytest.mark.parametrize(
    "overrides",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
        {"rope_scaling": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
        {"rope_parameters": YARN_ROPE},
    ],
)
def test_an_override_reaches_all_layers_or_is_refused(
    overrides: dict[str, Any], tmp_path: Path
) -> None:
    write_model(tmp_path / "tables", HETEROGENEOUS[:3])
    with pytest.raises(CheckpointError, match=r"--hf-overrides: .*2 of 3 layers"):
        resolve_overrides(overridden(tmp_path / "tables", overrides))
    write_model(tmp_path / "none", WITHOUT_TABLES)
    resolve_overrides(overridden(tmp_path / "none", overrides))


def test_yarn_by_an_override_scales_the_scores_of_all_layers(tmp_path: Path) -> None:
    write_model(tmp_path / "none", WITHOUT_TABLES)
    before, after = (
        overridden(tmp_path / "none", overrides).served
        for overrides in ({}, {"rope_parameters": YARN_ROPE | {"attention_factor": 1.5}})
    )
    assert after.score_scale == 1.5**2 * before.score_scale
    assert after.section() == before.section()


def test_tables_are_named_before_a_spelling_that_they_would_refuse(tmp_path: Path) -> None:
    write_model(tmp_path / "tables", HETEROGENEOUS[:3])
    with pytest.raises(CheckpointError, match="2 of 3 layers"):
        resolve_overrides(overridden(tmp_path / "tables", {"rope_theta": 5e5}))


def test_overrides_that_do_not_change_rope_pass(tmp_path: Path) -> None:
    write_model(tmp_path / "tables", HETEROGENEOUS[:3])
    same = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000}}
    for overrides in ({}, same, {"rope_theta": 1e4}, {"max_position_embeddings": 4096}):
        resolve_overrides(overridden(tmp_path / "tables", overrides))


def test_an_override_that_engines_would_ignore_is_refused(tmp_path: Path) -> None:
    """transformers uses rope_parameters, and its own default for a rope_theta that is missing."""
    write_model(tmp_path / "none", WITHOUT_TABLES)
    with pytest.raises(CheckpointError, match=r"--hf-overrides: .*rope_theta") as refused:
        resolve_overrides(overridden(tmp_path / "none", {"rope_theta": 5e5}))
    spelled = json.loads(str(refused.value).split("'")[1])
    assert spelled["rope_parameters"]["rope_theta"] == 5e5
    hf_config = overridden(tmp_path / "none", spelled)
    resolve_overrides(hf_config)
    without_theta = {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    for overrides in (without_theta, {"rope_parameters": None}):
        with pytest.raises(CheckpointError, match=r"--hf-overrides: .*rope_theta"):
            resolve_overrides(overridden(tmp_path / "none", overrides))


def _loads(directory: Path) -> dict[str, torch.Tensor]:
    return dict(stream(ModelConfigStub(directory)))


def _write_compressed(directory: Path, source: dict[str, str]) -> None:
    """Write a model whose tables hold every other frequency of its config.json."""
    layout = write_model(directory, HETEROGENEOUS[:3])
    own = inverse_frequencies(RopeParameters(rope_theta=1e4), layout.head_dim)
    tensors = load_file(directory / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("rope_inv_freq"):
            tensors[name] = own[: 2 * tensor.shape[1] : 2][: tensor.shape[1]].clone()
            tensors[name] = pad(tensors[name], (0, tensor.shape[1] - len(tensors[name])))[None]
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    raw = json.loads((directory / "config.json").read_text())
    raw["gac"]["source"] = source
    (directory / "config.json").write_text(json.dumps(raw))


@pytest.mark.parametrize(("source", "ours"), [({"tool": "vllm-gac 0.1"}, True), ({}, False)])
def test_rope_edited_in_a_compressed_models_config_is_refused(
    source: dict[str, str], ours: bool, tmp_path: Path
) -> None:
    _write_compressed(tmp_path / "model", source)
    assert any(name.endswith("rope_inv_freq") for name in _loads(tmp_path / "model"))
    raw = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(raw | {"rope_theta": 5e5}))
    if ours:
        with pytest.raises(CheckpointError, match="rope_inv_freq"):
            _loads(tmp_path / "model")
        assert "rope_inv_freq: has frequencies" in verify(tmp_path / "model").faults[0]
    else:  # other tools may choose any frequencies
        _loads(tmp_path / "model")

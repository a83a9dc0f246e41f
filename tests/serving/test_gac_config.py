"""The config of a gac model in transformers carries both layouts, and reads them once."""

import copy
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from tests.serving.models import HETEROGENEOUS, write_model
from tests.support.dense_models import config
from vllm_gac.alignment.rules import padded_layout
from vllm_gac.errors import CheckpointError
from vllm_gac.layout.dims import layout_of
from vllm_gac.layout.families import FAMILIES
from vllm_gac.serving import gac_config
from vllm_gac.serving.gac_config import GacConfig


def test_layouts_are_read_once_until_an_attribute_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = write_model(tmp_path / "model", HETEROGENEOUS)
    hf_config, times = GacConfig.from_pretrained(tmp_path / "model"), []
    read = gac_config.layout_in
    monkeypatch.setattr(gac_config, "layout_in", lambda *of: times.append(1) or read(*of))
    assert hf_config.served == hf_config.stored == hf_config.stored == stored
    assert len(times) == 1
    padded = padded_layout(stored, "minimal")
    hf_config.serve(padded)
    assert (hf_config.served, hf_config.stored, len(times)) == (padded, stored, 1)
    for sent in (copy.deepcopy(hf_config), pickle.loads(pickle.dumps(hf_config))):
        assert (sent.served, sent.stored) == (padded, stored)
        assert sent.original["gac"] == hf_config.original["gac"]
    hf_config.rms_norm_eps = 2.0
    with pytest.raises(CheckpointError, match="rms_norm_eps"):
        _ = hf_config.served


@pytest.mark.parametrize("family", FAMILIES)
def test_gac_config_is_also_the_config_of_its_family(family: str, tmp_path: Path) -> None:
    raw: dict[str, Any] = config(model_type=family)
    raw |= {"gac": layout_of(raw).section(), "architectures": ["GacLlamaForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    hf_config = GacConfig.from_pretrained(tmp_path)
    assert isinstance(hf_config, (CONFIG_MAPPING[family]))
    plain = CONFIG_MAPPING[family].from_pretrained(tmp_path)
    assert hf_config.to_dict() == plain.to_dict()
    assert json.loads(hf_config.to_json_string())["gac"] == raw["gac"]


def test_a_dense_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config()))
    with pytest.raises(CheckpointError, match="gac"):
        GacConfig.from_pretrained(tmp_path)

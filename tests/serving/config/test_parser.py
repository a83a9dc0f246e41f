"""What the config parser makes of a directory, and what it leaves to vLLM's."""

import json
from pathlib import Path
from typing import Any

import pytest
from vllm.transformers_utils.config import HFConfigParser

from tests.importers.layer_models import heterogeneous
from tests.importers.tools import write
from tests.serving.models import HETEROGENEOUS, write_model
from tests.serving.stubs import ModelConfigStub, stream
from tests.support.dense_models import config
from vllm_gac import demo
from vllm_gac.errors import CheckpointError
from vllm_gac.serving.config.parser import GacConfigParser
from vllm_gac.serving.gac_config import GacConfig


def test_a_gac_model_gets_a_config_with_its_layouts(tmp_path: Path) -> None:
    layout = write_model(tmp_path, HETEROGENEOUS[:2])
    raw, parsed = GacConfigParser().parse(tmp_path, trust_remote_code=False, revision=None)
    assert isinstance(parsed, GacConfig)
    assert parsed.stored == layout
    assert raw["architectures"] == ["GacLlamaForCausalLM"]


def test_a_gac_model_whose_config_is_not_well_formed_is_refused(tmp_path: Path) -> None:
    write_model(tmp_path, HETEROGENEOUS[:2])
    text = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace("{", '{"hidden_size": 1, ', 1))
    with pytest.raises(CheckpointError, match="hidden_size"):
        GacConfigParser().parse(tmp_path, trust_remote_code=False)


def test_everything_else_goes_to_the_previous_parser(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[Any] = []

    class Before(HFConfigParser):
        def parse(self, *args: Any, **kwargs: Any) -> Any:
            calls.append((args, kwargs))
            return {}, None

    monkeypatch.setattr(GacConfigParser, "before", Before)
    assert GacConfigParser().parse(str(demo.MODEL), True, "main", token="t") == ({}, None)
    assert calls == [((str(demo.MODEL), True, "main"), {"token": "t"})]


def test_the_loader_sends_what_another_tool_wrote_to_import(tmp_path: Path) -> None:
    raw = config()
    write(tmp_path, raw, heterogeneous(raw, [{"intermediate_size": 40}, {}]))
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp.*vllm-gac import"):
        dict(stream(ModelConfigStub(tmp_path, json.loads((tmp_path / "config.json").read_text()))))

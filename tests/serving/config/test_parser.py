"""What the config parser makes of a directory, and what it leaves to vLLM's."""

import json
from pathlib import Path
from typing import Any

import pytest
from vllm.transformers_utils.config import HFConfigParser

from tests.importers.layer_models import heterogeneous
from tests.importers.tools import write
from tests.serving.stubs import ModelConfigStub, stream
from tests.support.dense_models import config
from vllm_gac import demo
from vllm_gac.errors import CheckpointError
from vllm_gac.serving.config.parser import GacConfigParser


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

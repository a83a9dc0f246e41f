"""Models on the Hub: by id and revision, offline, and with --download-dir beside their configs."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm.config.load import LoadConfig

from tests.importers.palu_models import palu, ranks_of
from tests.importers.tools import write
from tests.serving.engines import OPTIONS, returned
from tests.serving.models import HETEROGENEOUS, write_model
from tests.serving.stubs import ModelConfigStub
from tests.support import hub
from tests.support.dense_models import config as dense_config
from tests.support.hub import Repository
from vllm_gac.errors import CheckpointError
from vllm_gac.layout.dims import layout_of
from vllm_gac.serving.config.hook import check_download_dir
from vllm_gac.serving.config.parser import GacConfigParser
from vllm_gac.serving.loading.loader import GacModelLoader

REVISION = "0123456789abcdef0123456789abcdef01234567"


def _hub_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Path]:
    """vLLM's config of org/model, and its weights, stored as huggingface_hub stores a download."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    write_model(tmp_path / "model", HETEROGENEOUS[:4])
    downloaded = tmp_path / "downloads" / "models--org--model"
    snapshot = downloaded / "snapshots" / REVISION
    for folder in (snapshot, downloaded / "blobs", downloaded / "refs"):
        folder.mkdir(parents=True)
    (downloaded / "refs" / "main").write_text(REVISION)
    blob = (tmp_path / "model" / "model.safetensors").rename(downloaded / "blobs" / "1f2e")
    (snapshot / "model.safetensors").symlink_to("../../blobs/1f2e")
    config = ModelConfigStub(tmp_path / "model")
    config.model = "org/model"
    return config, blob


def _load(config: Any, downloads: Path) -> dict[str, torch.Tensor]:
    loader = GacModelLoader(LoadConfig(load_format="gac", download_dir=str(downloads)))
    return dict(loader.get_all_weights(config, torch.nn.Module()))


def test_weights_downloaded_without_their_config_are_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, blob = _hub_model(tmp_path, monkeypatch)
    loaded = _load(config, tmp_path / "downloads")
    stored = load_file(blob)
    assert loaded.keys() == stored.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in stored.items())


def test_downloaded_weights_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, blob = _hub_model(tmp_path, monkeypatch)
    tensors = load_file(blob)
    del tensors["model.norm.weight"]
    save_file(tensors, blob, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight"):
        _load(config, tmp_path / "downloads")


def test_a_model_of_another_tool_is_known_by_its_id(tmp_path: Path) -> None:
    ranks = ranks_of([([9, 16], [12, 31]), ([17], [33])])
    write(tmp_path / "palu", *palu(dense_config(), ranks))
    dense = write_model(tmp_path / "gac", HETEROGENEOUS[:2])
    with hub.running() as here, hub.used_here(here, tmp_path / "home"):
        here.models["org/palu"] = Repository({"v1": hub.files_of(tmp_path / "palu")})
        here.models["org/gac"] = Repository({"main": hub.files_of(tmp_path / "gac")})
        local, _ = GacConfigParser().parse(tmp_path / "palu", False)
        raw, served = GacConfigParser().parse("org/palu", False, revision="v1")
        assert raw["gac"]["layers"] == local["gac"]["layers"]
        assert served.name_or_path == "org/palu"
        config = SimpleNamespace(model="org/palu", revision="v1")
        with pytest.raises(CheckpointError, match=r"--download-dir down: .*org/palu"):
            check_download_dir(config, LoadConfig(download_dir="down"))
        check_download_dir(config, LoadConfig())
        # Of a gac model, vLLM fetches the weights where they are to be.
        gac = SimpleNamespace(model="org/gac", revision=None)
        check_download_dir(gac, LoadConfig(download_dir="down"))
        here.asked.clear()
        raw, _ = GacConfigParser().parse("org/gac", False, revision=None)
        assert layout_of(raw) == dense
        assert not any("safetensors" in asked for asked in here.asked)


SCRIPT = """
import json, sys

if __name__ == "__main__":
    from vllm import LLM, SamplingParams

    model, options = json.loads(sys.argv[1])
    llm = LLM(model, **options)
    sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    prompt = {"prompt_token_ids": list(range(5, 45))}
    (output,) = llm.generate([prompt], sampling, use_tqdm=False)
    print("RETURNED " + json.dumps(list(output.outputs[0].token_ids)))
"""


@pytest.mark.slow
def test_an_engine_takes_an_id_with_a_revision_a_download_dir_and_offline(tmp_path: Path) -> None:
    write_model(tmp_path / "model", HETEROGENEOUS[:2])
    write_model(tmp_path / "other", HETEROGENEOUS[2:4])
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with hub.running() as here:
        versions = {name: hub.files_of(tmp_path / name) for name in ("model", "other")}
        here.models["org/model"] = Repository({"main": versions["other"], "v1": versions["model"]})
        env = here.environment(tmp_path / "home")
        v1: dict[str, Any] = {"revision": "v1", "tokenizer_revision": "v1"}
        apart = v1 | {"download_dir": str(tmp_path / "downloads")}
        expected = _generated(script, str(tmp_path / "model"), {}, env)
        assert _generated(script, "org/model", apart, env) == expected
        assert list((tmp_path / "downloads").glob("models--org--model/snapshots/*/*.safetensors"))
        assert _generated(script, "org/model", v1, env) == expected
    # The Hub is gone.
    assert _generated(script, "org/model", v1, env | {"HF_HUB_OFFLINE": "1"}) == expected


def _generated(script: Path, model: str, options: dict[str, Any], env: dict[str, str]) -> Any:
    return returned([str(script), json.dumps([model, OPTIONS | options])], env)

"""Models on the Hub: by id and revision, offline, and with --download-dir beside their configs."""

from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm.config.load import LoadConfig

from tests.serving.engines import in_engine_process, served
from tests.serving.models import HETEROGENEOUS, write_model
from tests.serving.stubs import ModelConfigStub
from tests.support import hub
from tests.support.hub import Repository
from vllm_gac.errors import CheckpointError
from vllm_gac.serving.loading.loader import GacModelLoader


def _hub_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Path]:
    """vLLM's config of org/model, and its weights, stored as huggingface_hub stores a download."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    write_model(tmp_path / "model", HETEROGENEOUS[:4])
    config = ModelConfigStub(tmp_path / "model")
    config.model = "org/model"
    weights = tmp_path / "model" / "model.safetensors"
    snapshot = hub.cached(tmp_path, "org/model", {weights.name: weights.read_bytes()})
    weights.unlink()
    return config, (snapshot / weights.name).resolve()


def _load(config: Any, tmp_path: Path) -> dict[str, torch.Tensor]:
    loader = GacModelLoader(LoadConfig(load_format="gac", download_dir=str(tmp_path / "hub")))
    return dict(loader.get_all_weights(config, torch.nn.Module()))


def test_weights_downloaded_without_their_config_are_checked_and_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, blob = _hub_model(tmp_path, monkeypatch)
    loaded, stored = _load(config, tmp_path), load_file(blob)
    assert loaded.keys() == stored.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in stored.items())
    del stored["model.norm.weight"]
    save_file(stored, blob, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight"):
        _load(config, tmp_path)


@pytest.mark.slow
def test_engine_loads_a_hub_model_by_revision_with_download_dir_and_offline(tmp_path: Path) -> None:
    write_model(tmp_path / "model", HETEROGENEOUS[:2])
    write_model(tmp_path / "other", HETEROGENEOUS[2:4])
    with hub.running() as here:
        versions = {name: hub.files_of(tmp_path / name) for name in ("model", "other")}
        here.models["org/model"] = Repository({"main": versions["other"], "v1": versions["model"]})
        env = here.environment(tmp_path / "home")
        v1: dict[str, Any] = {"revision": "v1", "tokenizer_revision": "v1"}
        apart = v1 | {"download_dir": str(tmp_path / "downloads")}
        expected = in_engine_process(served, str(tmp_path / "model"), **env)
        assert in_engine_process(served, "org/model", apart, **env) == expected
        assert list((tmp_path / "downloads").glob("models--org--model/snapshots/*/*.safetensors"))
        assert in_engine_process(served, "org/model", v1, **env) == expected
    # The Hub is gone.
    assert in_engine_process(served, "org/model", v1, **env, HF_HUB_OFFLINE="1") == expected

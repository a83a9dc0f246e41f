"""Models on the Hub: --download-dir keeps their weights apart from their configs."""

from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm.config.load import LoadConfig

from tests.serving.models import HETEROGENEOUS, write_model
from tests.serving.stubs import ModelConfigStub
from vllm_gac.errors import CheckpointError
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
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight: missing, expected shape"):
        _load(config, tmp_path / "downloads")

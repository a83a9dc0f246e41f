"""Stands in for vLLM's ModelConfig, and for its platform, in tests without an engine."""

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig
from vllm.config.load import LoadConfig
from vllm.platforms.interface import DeviceCapability

from vllm_gac.serving.loading.loader import GacModelLoader


class ModelConfigStub:
    """The attributes that the loader reads. The config is `raw`, or that of the directory."""

    def __init__(self, directory: Path, raw: dict[str, Any] | None = None) -> None:
        self.model = str(directory)
        self.revision = None
        if raw is None:
            self.hf_config = AutoConfig.from_pretrained(directory)
        else:
            self.hf_config = CONFIG_MAPPING[raw["model_type"]].from_dict(raw)


def stream(model_config: Any, **options: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that the loader, with these options of its own, gives to a model."""
    loader = GacModelLoader(LoadConfig(load_format="gac", model_loader_extra_config=options))
    return loader.get_all_weights(model_config, torch.nn.Module())


def run_on(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] | None, *modules: ModuleType
) -> None:
    """Let `modules` see a GPU of this compute capability; None: a CPU."""
    platform = SimpleNamespace(is_cuda=lambda: capability is not None)
    if capability is not None:
        platform.get_device_capability = lambda: DeviceCapability(*capability)
    for module in modules:
        monkeypatch.setattr(module, "current_platform", platform)

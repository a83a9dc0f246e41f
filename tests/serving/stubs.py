"""Stands in for vLLM's configs, and for its platform, in tests without an engine."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from vllm.config.load import LoadConfig
from vllm.platforms.interface import DeviceCapability

from vllm_gac.layout.dims import ModelLayout
from vllm_gac.serving.gac_config import GacConfig
from vllm_gac.serving.loading.loader import GacModelLoader


class ModelConfigStub:
    """The attributes that the loader reads."""

    def __init__(self, directory: Path) -> None:
        self.model = str(directory)
        self.revision = None
        self.hf_config = AutoConfig.from_pretrained(directory)


class VllmConfigStub(SimpleNamespace):
    """The fields of VllmConfig that the steps of the config hook and the loader read."""

    def __init__(
        self,
        directory: Path,
        options: Mapping[str, Any] | None = None,
        *,
        hf_config: Any = None,
        load_format: str = "gac",
        tp: int = 1,
        pp: int = 1,
        quantization: str | None = None,
        cache_dtype: str = "auto",
        trainer: object = None,
        lora: object = None,
        **model: Any,
    ) -> None:
        """The config of `vllm serve directory` with these loader `options`.

        `hf_config` is by default that of a gac model; `model` are further fields of ModelConfig.
        """
        hf_config = hf_config or GacConfig.from_pretrained(directory)
        super().__init__(
            model_config=SimpleNamespace(
                model=str(directory),
                revision=None,
                hf_config=hf_config,
                get_model_arch_config=lambda: (hf_config.head_dim, hf_config.num_key_value_heads),
                model_arch_config=None,
                quantization=quantization,
                quantization_config=None,
                dtype=torch.bfloat16,
                **model,
            ),
            load_config=LoadConfig(
                load_format=load_format,
                use_tqdm_on_load=False,
                model_loader_extra_config=dict(options or {}),
            ),
            parallel_config=SimpleNamespace(tensor_parallel_size=tp, pipeline_parallel_size=pp),
            cache_config=SimpleNamespace(
                cache_dtype=cache_dtype, kv_cache_dtype_skip_layers=[], sliding_window=None
            ),
            weight_transfer_config=trainer,
            lora_config=lora,
        )

    @property
    def served(self) -> ModelLayout:
        layout: ModelLayout = self.model_config.hf_config.served
        return layout

    @property
    def stored(self) -> ModelLayout:
        layout: ModelLayout = self.model_config.hf_config.stored
        return layout

    def stream(self, model: torch.nn.Module | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """What a new loader, which has only the config, gives to `model`."""
        loader = GacModelLoader(self.load_config)
        return loader.get_all_weights(self.model_config, model or torch.nn.Module())


def stream(directory: Path, **options: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The unpadded tensors that the loader, with these options of its own, reads."""
    loader = GacModelLoader(LoadConfig(load_format="gac", model_loader_extra_config=options))
    return loader.get_all_weights(ModelConfigStub(directory), torch.nn.Module())  # type: ignore[arg-type]


def run_on(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int] | None, *modules: ModuleType
) -> None:
    """Let `modules` see a GPU of this compute capability; None: a CPU."""
    platform = SimpleNamespace(is_cuda=lambda: capability is not None)
    if capability is not None:
        platform.get_device_capability = lambda: DeviceCapability(*capability)
    for module in modules:
        monkeypatch.setattr(module, "current_platform", platform)

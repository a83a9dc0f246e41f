"""Kernels are compiled ahead: prefill with tensors as they are served, and those of MLPs."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from vllm.config import CacheConfig

from tests.serving.stubs import VllmConfigStub
from tests.support.dense_models import config, write
from vllm_gac.layout.cache_geometry import CacheGeometry
from vllm_gac.serving.attention import prefill_memory, warmup
from vllm_gac.serving.attention.prefill import PrefillBatch, PrefillLayer
from vllm_gac.serving.gac_config import serve_by_our_layers

CPU = torch.device("cpu")
GEOMETRY = CacheGeometry(8, 120, 4, 120, 2, 80)


@pytest.fixture
def layers() -> dict[str, SimpleNamespace]:
    """Two equal layers."""
    return {name: _layer(torch.bfloat16, torch.ones(())) for name in ("0", "1")}


def _layer(cached: torch.dtype, k_scale: torch.Tensor) -> SimpleNamespace:
    impl = SimpleNamespace(
        prefill_layer=PrefillLayer(GEOMETRY, "FA3", (9, 0), 0.1), cached_dtype=lambda layer: cached
    )
    return SimpleNamespace(impl=impl, get_buffer={"_k_scale": k_scale}.__getitem__)


@pytest.fixture
def runs(
    monkeypatch: pytest.MonkeyPatch, layers: dict[str, SimpleNamespace]
) -> Iterator[list[tuple[Any, ...]]]:
    """Arguments of every prefill call, for a model of `layers`."""
    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr(prefill_memory, "get_layers_from_vllm_config", lambda *_: layers)
    monkeypatch.setattr(warmup, "prefill_attention", lambda *args: seen.append(args))
    monkeypatch.setattr(warmup, "_compiled", set())
    for name in ("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"):
        monkeypatch.setenv(name, "")  # so that it is restored afterwards
    return seen


def _compile(layout: str) -> None:
    cache = CacheConfig()
    cache.kv_cache_layout = layout
    config: Any = SimpleNamespace(
        cache_config=cache, model_config=SimpleNamespace(dtype=torch.bfloat16)
    )
    warmup.compile_prefill_kernels(config, 32, CPU)


@pytest.mark.parametrize(
    ("layout", "strides"), [("LBHNC", (32 * 320, 320)), ("LBNHC", (320, 2 * 320))]
)
def test_prefill_of_every_class_compiles_once_without_and_with_a_past(
    layout: str, strides: tuple[int, int], runs: list[tuple[Any, ...]]
) -> None:
    for _ in range(2):
        _compile(layout)
    pasts = []
    for _, query, key, value, cache, batch, output, *scales in runs:
        assert isinstance(batch, PrefillBatch)
        tokens = query.shape[0]
        pasts.append(batch.has_past)
        assert query.shape == (tokens, 8, 120)
        assert key.shape == (tokens, 2, 240)
        assert value.shape == (tokens, 2, 80)
        assert output.shape == (tokens, 8, 80)
        assert cache.shape == (1, 2, 32, 320)
        assert cache.stride()[1:3] == strides
        assert scales == [None, None]
    assert pasts == [False, True]


def test_prefill_is_compiled_for_every_kind_of_scales(
    layers: dict[str, SimpleNamespace], runs: list[tuple[Any, ...]]
) -> None:
    scales = torch.ones(()), torch.ones(4), torch.ones(())
    layers |= {str(i): _layer(torch.float8_e4m3fn, scale) for i, scale in enumerate(scales)}
    _compile("LBHNC")
    assert [[x.shape for x in run[-2:]] for run in runs] == [[()] * 2] * 2 + [[(4,)] * 2] * 2


def test_mlp_kernels_are_compiled_for_a_dense_model_with_our_layers(tmp_path: Path) -> None:
    """vLLM keeps the architecture that it read first."""
    dense = AutoConfig.from_pretrained(write(tmp_path / "model", config(intermediate_size=96)))
    name = "LlamaForCausalLM"
    stub: Any = VllmConfigStub(tmp_path / "model", hf_config=dense, architecture=name, tp=2)
    stub.quant_config = None
    assert warmup._mlps(stub) == set()
    serve_by_our_layers(stub.model_config)
    assert warmup._mlps(stub) == {(48, torch.bfloat16)}

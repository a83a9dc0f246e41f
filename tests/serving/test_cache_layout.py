"""Pages lie head by head, unless somebody else decides."""

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import AttentionConfig, CacheConfig, KVTransferConfig, VllmConfig
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_gac.serving import cache_layout


@pytest.fixture(autouse=True)
def _cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_layout, "current_platform", SimpleNamespace(is_cuda=lambda: True))
    monkeypatch.delenv("VLLM_KV_CACHE_LAYOUT", raising=False)


def _chosen(**asked: Any) -> str | None:
    settings = {"attention_config": AttentionConfig(), "kv_transfer_config": None} | asked
    config: Any = SimpleNamespace(cache_config=CacheConfig(), **settings)
    cache_layout.choose_cache_layout(config)
    layout: str | None = config.cache_config.kv_cache_layout
    return layout


def test_heads_come_first() -> None:
    assert _chosen() == "LBHNC"


def test_a_config_of_vllms_has_all_that_is_looked_at() -> None:
    config = VllmConfig()
    cache_layout.choose_cache_layout(config)
    assert config.cache_config.get_resolved_kv_cache_layout().is_block_contiguous


@pytest.mark.parametrize(
    "asked",
    [
        {"kv_transfer_config": KVTransferConfig()},
        {"attention_config": AttentionConfig(backend=AttentionBackendEnum.FLEX_ATTENTION)},
    ],
)
def test_vllm_decides_where_others_have_a_say(asked: dict[str, Any]) -> None:
    assert _chosen(**asked) is None


def test_what_the_user_asked_for_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "NHD")
    assert _chosen() is None


def test_a_cpu_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_layout, "current_platform", SimpleNamespace(is_cuda=lambda: False))
    assert _chosen() is None

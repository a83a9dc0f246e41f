"""Cache pages are stored head by head, unless the user or another component decides."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import AttentionConfig, CacheConfig, KVTransferConfig, VllmConfig
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_layout import KVCacheLayout

from vllm_gac.errors import CheckpointError
from vllm_gac.serving.config import cache_layout


@pytest.fixture(autouse=True)
def _cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_layout, "current_platform", SimpleNamespace(is_cuda=lambda: True))
    monkeypatch.delenv("VLLM_KV_CACHE_LAYOUT", raising=False)


def chosen(**requested: Any) -> str | None:
    config = VllmConfig()
    for name, value in requested.items():
        setattr(config, name, value)
    cache_layout.choose_cache_layout(config)
    layout: str | None = config.cache_config.kv_cache_layout
    return layout


FLEX = AttentionBackendEnum.FLEX_ATTENTION


@pytest.mark.parametrize(
    ("requested", "layout"),
    [
        ({}, "LBHNC"),
        # Another component may choose.
        ({"kv_transfer_config": KVTransferConfig()}, None),
        ({"cache_config": CacheConfig(kv_offloading_size=1.0)}, None),
        ({"attention_config": AttentionConfig(backend=FLEX)}, None),
        ({"attention_config": AttentionConfig(backend_per_kind={"full_attention": FLEX})}, None),
        ({"speculative_config": object()}, None),
    ],
)
def test_heads_come_first_unless_vllm_decides(requested: dict[str, Any], layout: str) -> None:
    assert chosen(**requested) == layout


@pytest.mark.parametrize("layout", ["NHD", "HND", *(layout.name for layout in KVCacheLayout)])
def test_the_users_choice_is_kept_or_refused(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", layout)
    if layout in ("LHBNC", "BHLNC"):
        with pytest.raises(CheckpointError, match=rf"^VLLM_KV_CACHE_LAYOUT: .*{layout}"):
            chosen()
    else:
        assert chosen() is None


def test_a_cpu_keeps_vllms_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_layout, "current_platform", SimpleNamespace(is_cuda=lambda: False))
    assert chosen() is None


@pytest.mark.parametrize("layout", KVCacheLayout)
def test_pages_have_the_strides_of_the_layout(layout: KVCacheLayout) -> None:
    blocks, heads, tokens, row = shape = (2, 3, 5, 7)
    pages = cache_layout.zero_pages(layout, shape, torch.float16, torch.device("cpu"))
    assert pages.shape == shape
    strides = {
        "BHN": (heads * tokens * row, tokens * row, row),
        "BNH": (heads * tokens * row, row, heads * row),
        "HBN": (tokens * row, blocks * tokens * row, row),
    }
    assert pages.stride() == (*strides[layout.name.replace("L", "").removesuffix("C")], 1)

"""KV connectors and layers whose caches differ: which are allowed, and why others are refused.

Those between two processes are in tests/serving/test_disaggregation.py.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config.kv_transfer import KVTransferConfig

from tests.serving.engines import (
    OPTIONS,
    answer,
    assert_same,
    each_in_engine_process,
    in_engine_process,
    outputs,
)
from tests.serving.models import HETEROGENEOUS, layer, layout_with, write_model
from vllm_gac.errors import CheckpointError
from vllm_gac.serving.config import kv_transfer
from vllm_gac.serving.config.kv_transfer import SEEN_TO_WORK, check_kv_transfer


def transfer_by(connector: str, **extra: Any) -> KVTransferConfig:
    return KVTransferConfig(
        kv_connector=connector, kv_role="kv_both", kv_connector_extra_config=extra
    )


@pytest.mark.slow
def test_connectors_bring_back_the_cache_of_every_layer_shape(tmp_path: Path) -> None:
    """The first engine stores its cache in files; a second one loads it instead of computing.

    DecodeBenchConnector fills a cache with numbers of its own.
    """
    write_model(tmp_path / "model", HETEROGENEOUS)
    example = {"connector": "ExampleConnector", "shared_storage_path": str(tmp_path / "cache")}
    calls = [(str(tmp_path / "model"), x) for x in (example, {"connector": "DecodeBenchConnector"})]
    first, filled = each_in_engine_process(_serve_with, calls)
    files = {path.name for path in (tmp_path / "cache").rglob("*.safetensors")}
    assert len(files) == len(HETEROGENEOUS)
    second = in_engine_process(_serve_with, *calls[0])
    assert first["loaded"] == [0, 0, 0, 0]
    assert all(tokens >= 128 for tokens in second["loaded"]), second["loaded"]
    assert_same(second["answers"], first["answers"])
    assert all(filled["loaded"])
    assert [tokens for tokens, _ in filled["answers"]] != [tokens for tokens, _ in first["answers"]]


def _serve_with(model: str, transfer: dict[str, str]) -> dict[str, Any]:
    from vllm import LLM

    # Each prompt fits in one step: ExampleConnector stores only a request's first step.
    options = OPTIONS | {"max_num_batched_tokens": 1024}
    answered = outputs(LLM(model, kv_transfer_config=transfer_by(**transfer), **options))
    return {
        "answers": [answer(output) for output in answered],
        "loaded": [output.num_cached_tokens for output in answered],
    }


# ---- refusals, without an engine -------------------------------------------------------------


MIXED = layout_with(HETEROGENEOUS[:3])
ALIKE = layout_with([layer(("rotary", 4, 48), (4, 48), width) for width in (512, 400)])


def config(connector: str | None, offloading: str | None = None, **extra: Any) -> Any:
    """The fields of vLLM's config that the check reads."""
    return SimpleNamespace(
        kv_transfer_config=transfer_by(connector, **extra) if connector else None,
        cache_config=SimpleNamespace(
            kv_offloading_size=1.0 if offloading else None, kv_offloading_backend=offloading
        ),
    )


def multi(*connectors: str, nested: bool = False) -> Any:
    children: list[Any] = [{"kv_connector": name, "kv_role": "kv_both"} for name in connectors]
    if nested:
        inner = {"connectors": children}
        children = [{"kv_connector": "MultiConnector", "kv_connector_extra_config": inner}]
    return config("MultiConnector", connectors=children)


@pytest.fixture(autouse=True)
def vllm_0_32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_transfer, "installed_version", lambda: "0.32.1+cpu")


@pytest.mark.parametrize(
    "allowed",
    [
        *map(config, SEEN_TO_WORK),
        multi("ExampleConnector", "OffloadingConnector"),
        multi("ExampleConnector", nested=True),
        config("OffloadingConnector", spec_name="CPUOffloadingSpec"),
        config(None),
        config(None, "native"),
    ],
)
def test_connectors_that_were_seen_to_work_are_allowed(allowed: Any) -> None:
    check_kv_transfer(allowed, MIXED)


@pytest.mark.parametrize(
    ("refused", "env", "named"),
    [
        (config("MoRIIOConnector"), None, "MoRIIOConnector"),
        (config("TheirConnector"), None, "TheirConnector"),
        (multi("ExampleConnector", "LMCacheConnectorV1"), None, "LMCacheConnectorV1"),
        (multi("LMCacheConnectorV1", nested=True), None, "LMCacheConnectorV1"),
        (config("OffloadingConnector", spec_name="Tiering"), None, "OffloadingConnector with Tier"),
        (
            config("OffloadingConnector", spec_module_path="mine"),
            None,
            "OffloadingConnector with mi",
        ),
        (config(None, "lmcache"), None, "LMCacheMPConnector"),
        (config(None, "native"), "VLLM_USE_SIMPLE_KV_OFFLOAD", "SimpleCPUOffloadConnector"),
    ],
)
def test_unsupported_connectors_are_refused_with_an_alternative(
    refused: Any, env: str | None, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if env is not None:
        monkeypatch.setenv(env, "1")
    check_kv_transfer(refused, ALIKE)  # a cache of the dense model's shape: vLLM's own business
    with pytest.raises(CheckpointError) as error:
        check_kv_transfer(refused, MIXED)
    # The cache of the first layer that differs, that of the dense model, and what to use.
    shown = (named, "layer 0", "4 x (64 + 64)", "4 x (80 + 80)", "OffloadingConnector")
    assert all(each in str(error.value) for each in shown)


@pytest.mark.parametrize("connectors", [["NixlConnector"], None, {"kv_connector": "x"}])
def test_connectors_that_are_no_list_of_objects_are_refused(connectors: Any) -> None:
    with pytest.raises(CheckpointError, match="connectors: expected a list"):
        check_kv_transfer(config("MultiConnector", connectors=connectors), MIXED)


def test_a_connector_of_another_module_is_refused() -> None:
    external = config("ExampleConnector")
    external.kv_transfer_config.kv_connector_module_path = "mine.connectors"
    with pytest.raises(CheckpointError, match=r"mine\.connectors\.ExampleConnector"):
        check_kv_transfer(external, MIXED)


def test_nixl_is_refused_with_a_release_that_it_was_not_tried_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kv_transfer, "installed_version", lambda: "0.320.0")
    check_kv_transfer(config("OffloadingConnector"), MIXED)
    with pytest.raises(CheckpointError, match="NixlConnector"):
        check_kv_transfer(multi("ExampleConnector", "NixlConnector"), MIXED)


@pytest.mark.parametrize(
    "attention",
    [
        (("rotary", 4, 48), (4, 32)),  # unequal
        (("rotary", 2, 48), (2, 48)),  # fewer heads than config.json says
        (("latent", 4, 48), (2, 96)),
    ],
)
def test_equal_layers_that_differ_from_config_json_are_refused(attention: Any) -> None:
    with pytest.raises(CheckpointError, match="layer 0"):
        check_kv_transfer(config("MoRIIOConnector"), layout_with([layer(*attention, 512)] * 2))

"""KV connectors and layers whose caches differ: which are allowed, and why others are refused.

Those between two processes are in tests/serving/test_disaggregation.py.
"""

import importlib.metadata
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config.kv_transfer import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from tests.serving.engines import OPTIONS, answer, assert_same, in_engine_process, outputs
from tests.serving.models import HETEROGENEOUS, layer, layout_with, write_model
from vllm_gac.errors import CheckpointError
from vllm_gac.serving.config import kv_transfer
from vllm_gac.serving.config.kv_transfer import (
    BY_PACKAGE,
    LAYER_BY_LAYER,
    REFUSED,
    Package,
    check_kv_transfer,
)


def transfer_by(connector: str, **extra: Any) -> KVTransferConfig:
    return KVTransferConfig(
        kv_connector=connector, kv_role="kv_both", kv_connector_extra_config=extra
    )


@pytest.mark.slow
def test_the_example_connector_brings_back_the_cache_of_every_layer_shape(tmp_path: Path) -> None:
    """The first engine stores its cache in files; a second one loads it instead of computing."""
    write_model(tmp_path / "model", HETEROGENEOUS)
    arguments = (str(tmp_path / "model"), str(tmp_path / "cache"))
    first = in_engine_process(_serve_with_example_connector, *arguments)
    files = {path.name for path in (tmp_path / "cache").rglob("*.safetensors")}
    assert len(files) == len(HETEROGENEOUS)
    second = in_engine_process(_serve_with_example_connector, *arguments)
    assert first["loaded"] == [0, 0, 0, 0]
    assert all(tokens >= 128 for tokens in second["loaded"]), second["loaded"]
    assert_same(second["answers"], first["answers"])


def _serve_with_example_connector(model: str, cache: str) -> dict[str, Any]:
    from vllm import LLM

    transfer = transfer_by("ExampleConnector", shared_storage_path=cache)
    # Each prompt fits in one step: this connector stores only a request's first step.
    llm = LLM(model, kv_transfer_config=transfer, **OPTIONS | {"max_num_batched_tokens": 1024})
    answered = outputs(llm)
    return {
        "answers": [answer(output) for output in answered],
        "loaded": [output.num_cached_tokens for output in answered],
    }


# ---- refusals, without an engine -------------------------------------------------------------


MIXED = layout_with(HETEROGENEOUS[:3])
LMCACHE_MODE = {"lmcache.mp.mp_transfer_mode": "lmcache_driven"}
ALIKE = layout_with([layer(("rotary", 4, 48), (4, 48), width) for width in (512, 400)])


def config(connector: str | None, offloading: str | None = None, **extra: Any) -> Any:
    """The fields of vLLM's config that the check reads."""
    return SimpleNamespace(
        kv_transfer_config=transfer_by(connector, **extra) if connector else None,
        cache_config=SimpleNamespace(
            kv_offloading_size=1.0 if offloading else None, kv_offloading_backend=offloading
        ),
    )


def multi(*connectors: str) -> Any:
    children = [{"kv_connector": name, "kv_role": "kv_both"} for name in connectors]
    return config("MultiConnector", connectors=children)


def test_every_connector_of_vllm_is_listed() -> None:
    known = [*LAYER_BY_LAYER, *BY_PACKAGE, *REFUSED, "MultiConnector"]
    assert sorted(KVConnectorFactory._registry) == sorted(known)


@pytest.mark.parametrize("connector", LAYER_BY_LAYER)
def test_connectors_that_move_each_layer_are_allowed(connector: str) -> None:
    check_kv_transfer(config(connector), MIXED)


def install(monkeypatch: pytest.MonkeyPatch, vllm: str, **packages: str) -> None:
    """Have the check see these versions of vLLM and of packages, and no other package."""

    def version(name: str) -> str:
        if name not in packages:
            raise importlib.metadata.PackageNotFoundError(name)
        return packages[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(kv_transfer, "installed_version", lambda: vllm)


@pytest.mark.parametrize(("connector", "package"), BY_PACKAGE.items())
def test_a_connector_is_allowed_with_the_versions_that_were_tested(
    connector: str, package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    for release in package.releases:
        install(monkeypatch, f"{release}.0+cpu", **{package.name: package.version})
        check_kv_transfer(config(connector, **LMCACHE_MODE), MIXED)


@pytest.mark.parametrize("connector", BY_PACKAGE)
def test_other_versions_are_refused_with_those_that_were_tested(
    connector: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, tested = BY_PACKAGE[connector].name, BY_PACKAGE[connector].version
    for vllm, packages, named in (
        ("0.32.1", {}, name),
        ("0.32.1", {name: "0.4"}, f"{name} 0.4"),
        ("0.31.0", {name: tested}, "vLLM 0.31.0"),
        ("0.320.0", {name: tested}, "vLLM 0.320.0"),
    ):
        install(monkeypatch, vllm, **packages)
        with pytest.raises(CheckpointError, match=f"with {name}=={tested} and vLLM") as refused:
            check_kv_transfer(multi("ExampleConnector", connector), MIXED)
        assert f"--kv-transfer-config: {connector} " in str(refused.value)
        assert named in str(refused.value)
    check_kv_transfer(config(connector), ALIKE)  # vLLM's own business


def test_lmcache_is_allowed_only_where_it_moves_layers_by_their_own_shapes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    package = BY_PACKAGE["LMCacheMPConnector"]
    install(monkeypatch, f"{package.releases[0]}.0", **{package.name: package.version})
    for mode in ({}, {"lmcache.mp.mp_transfer_mode": "engine_driven"}):
        with pytest.raises(CheckpointError, match='mp_transfer_mode": "lmcache_driven"'):
            check_kv_transfer(config("LMCacheMPConnector", **mode), MIXED)
    with pytest.raises(CheckpointError, match="LMCacheMPConnector"):
        check_kv_transfer(config(None, "lmcache"), MIXED)
    monkeypatch.setenv("LMCACHE_USE_UPSTREAM_MP", "1")
    with pytest.raises(CheckpointError, match="LMCACHE_USE_UPSTREAM_MP"):
        check_kv_transfer(config("LMCacheMPConnector", **LMCACHE_MODE), MIXED)


@pytest.mark.parametrize("connector", REFUSED)
def test_other_connectors_are_refused_with_layer_and_alternative(connector: str) -> None:
    with pytest.raises(CheckpointError, match=f"--kv-transfer-config: {connector} ") as refused:
        check_kv_transfer(config(connector), MIXED)
    # The cache of the first layer that differs, that of the dense model, and what to use.
    named = ("layer 0", "4 x (64 + 64)", "4 x (80 + 80)", "ExampleConnector", "NixlConnector")
    assert all(each in str(refused.value) for each in named)


@pytest.mark.parametrize("connector", REFUSED)
def test_any_connector_moves_a_cache_with_the_dense_models_shape(connector: str) -> None:
    check_kv_transfer(config(connector), ALIKE)


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


def test_each_child_of_a_multi_connector_is_checked() -> None:
    check_kv_transfer(multi("ExampleConnector", "OffloadingConnector"), MIXED)
    with pytest.raises(CheckpointError, match="LMCacheConnectorV1"):
        check_kv_transfer(multi("ExampleConnector", "LMCacheConnectorV1"), MIXED)


def test_each_child_of_a_nested_multi_connector_is_checked() -> None:
    def nested(connector: str) -> Any:
        inner = {"connectors": [{"kv_connector": connector, "kv_role": "kv_both"}]}
        child = {"kv_connector": "MultiConnector", "kv_connector_extra_config": inner}
        return config("MultiConnector", connectors=[child])

    check_kv_transfer(nested("ExampleConnector"), MIXED)
    with pytest.raises(CheckpointError, match="LMCacheConnectorV1"):
        check_kv_transfer(nested("LMCacheConnectorV1"), MIXED)


def test_a_connector_of_another_module_is_not_taken_for_vllms(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[str] = []
    logger = SimpleNamespace(warning=lambda text, *values: told.append(text % values))
    monkeypatch.setattr(kv_transfer, "logger", logger)
    named = config("ExampleConnector")
    check_kv_transfer(named, MIXED)
    assert not told
    named.kv_transfer_config.kv_connector_module_path = "mine.connectors"
    check_kv_transfer(named, MIXED)
    assert "mine.connectors.ExampleConnector" in told[0]


def test_the_offloading_flag_is_checked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    check_kv_transfer(config(None), MIXED)
    check_kv_transfer(config(None, "native"), MIXED)
    with pytest.raises(CheckpointError, match="LMCacheMPConnector"):
        check_kv_transfer(config(None, "lmcache"), MIXED)
    monkeypatch.setenv("VLLM_USE_SIMPLE_KV_OFFLOAD", "1")
    with pytest.raises(CheckpointError, match="SimpleCPUOffloadConnector"):
        check_kv_transfer(config(None, "native"), MIXED)


def test_an_external_connector_gets_a_warning(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    check_kv_transfer(config("TheirConnector"), MIXED)
    assert "TheirConnector" in caplog.text

"""KV connectors and layers whose caches differ: which are allowed, and why others are refused.

Those between two processes are in tests/serving/test_disaggregation.py.
"""

import importlib.metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config.kv_transfer import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

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
from vllm_gac.serving.config.kv_transfer import (
    BY_PACKAGE,
    LAYER_BY_LAYER,
    REFUSED,
    check_kv_transfer,
)


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
LMCACHE_MODE = {"lmcache.mp.mp_transfer_mode": "lmcache_driven"}


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


def test_every_connector_of_vllm_is_listed() -> None:
    listed = [*LAYER_BY_LAYER, *BY_PACKAGE, *REFUSED, "MultiConnector"]
    assert sorted(KVConnectorFactory._registry) == sorted(listed)


@pytest.mark.parametrize(
    "allowed",
    [
        *map(config, LAYER_BY_LAYER),
        multi("ExampleConnector", "OffloadingConnector"),
        multi("ExampleConnector", nested=True),
        config(None),
        config(None, "native"),
    ],
)
def test_connectors_that_move_each_layer_are_allowed(allowed: Any) -> None:
    check_kv_transfer(allowed, MIXED)


@pytest.mark.parametrize("connector", REFUSED)
def test_other_connectors_are_refused_with_layer_and_alternative(connector: str) -> None:
    with pytest.raises(CheckpointError, match=f"--kv-transfer-config: {connector} ") as refused:
        check_kv_transfer(config(connector), MIXED)
    # The cache of the first layer that differs, that of the dense model, and what to use.
    named = ("layer 0", "4 x (64 + 64)", "4 x (80 + 80)", "ExampleConnector", "NixlConnector")
    assert all(each in str(refused.value) for each in named)
    check_kv_transfer(config(connector), ALIKE)  # a cache of the dense model's shape


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


@pytest.mark.parametrize(
    ("refused", "env", "named"),
    [
        (multi("ExampleConnector", "LMCacheConnectorV1"), None, "LMCacheConnectorV1"),
        (multi("LMCacheConnectorV1", nested=True), None, "LMCacheConnectorV1"),
        (config(None, "lmcache"), None, "LMCacheMPConnector"),
        (config(None, "native"), "VLLM_USE_SIMPLE_KV_OFFLOAD", "SimpleCPUOffloadConnector"),
    ],
)
def test_connectors_within_others_and_behind_flags_are_refused(
    refused: Any, env: str | None, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if env is not None:
        monkeypatch.setenv(env, "1")
    with pytest.raises(CheckpointError, match=named):
        check_kv_transfer(refused, MIXED)


def install(monkeypatch: pytest.MonkeyPatch, vllm: str, **packages: str) -> None:
    """Have the check see these versions of vLLM and of packages, and no other package."""

    def version(name: str) -> str:
        if name not in packages:
            raise importlib.metadata.PackageNotFoundError(name)
        return packages[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(kv_transfer, "installed_version", lambda: vllm)


@pytest.mark.parametrize("connector", BY_PACKAGE)
def test_a_connector_is_allowed_with_the_versions_that_were_tested_alone(
    connector: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = BY_PACKAGE[connector]
    name, tested = package.name, package.version
    for release in package.releases:
        install(monkeypatch, f"{release}.0+cpu", **{name: tested})
        check_kv_transfer(config(connector, **LMCACHE_MODE), MIXED)
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
    monkeypatch.setenv("LMCACHE_USE_UPSTREAM_MP", "1")
    with pytest.raises(CheckpointError, match="LMCACHE_USE_UPSTREAM_MP"):
        check_kv_transfer(config("LMCacheMPConnector", **LMCACHE_MODE), MIXED)


@pytest.mark.parametrize(
    ("connector", "module", "named"),
    [
        ("ExampleConnector", None, None),
        ("ExampleConnector", "mine.connectors", "mine.connectors.ExampleConnector"),
        ("TheirConnector", None, "TheirConnector"),
    ],
)
def test_a_connector_that_is_not_vllms_gets_a_warning(
    connector: str, module: str | None, named: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    warnings: list[str] = []
    logger = SimpleNamespace(warning=lambda text, *values: warnings.append(text % values))
    monkeypatch.setattr(kv_transfer, "logger", logger)
    external = config(connector)
    external.kv_transfer_config.kv_connector_module_path = module
    check_kv_transfer(external, MIXED)
    assert [named in warning for warning in warnings] == [True] * (named is not None)

"""Which of vLLM's KV connectors can move a cache whose layers differ.

The lists follow the sources of vLLM 0.32 and 0.33 (distributed/kv_transfer/kv_connector/v1), which
`make check-vllm` compares with those of other releases. docs/kv-transfer.md says what was tried
with each connector, and what came of it. Every connector works for a gac model whose cache has the
shape of the dense model's.
"""

import importlib.metadata
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm import envs
from vllm.logger import init_logger

from vllm_gac.errors import CheckpointError
from vllm_gac.layout.dims import LayerLayout, ModelLayout
from vllm_gac.serving.registration import installed_version

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(f"vllm.{__name__}")  # vLLM configures loggers below its own

# These move each layer's tensor, or the bytes of its pages, whatever its shape.
LAYER_BY_LAYER = (
    "DecodeBenchConnector",
    "ExampleConnector",
    "OffloadingConnector",
)


@dataclass(frozen=True, slots=True)
class Package:
    """A package that a connector needs, and with what it moved a cache whose layers differ.

    `version` is the package's, `releases` are minor releases of vLLM.
    """

    name: str
    version: str
    releases: tuple[str, ...]


_NIXL = Package("nixl", "1.5.1", ("0.32",))
# These take the length of a page from each layer's tensor. The package and vLLM each do a part of
# the work, so only what was seen to work together is allowed.
BY_PACKAGE = {
    "NixlConnector": _NIXL,
    "NixlPullConnector": _NIXL,
    "LMCacheMPConnector": Package("lmcache", "0.5.6", ("0.32",)),
}
# LMCache's server moves each group of like layers by its own shape in this mode. In the other one
# the engine does, and takes the first layer's shape for all (lmcache/v1/multiprocess/
# transfer_context/base.py: compute_kv_layout).
_LMCACHE_MODE, _BY_GROUPS = "lmcache.mp.mp_transfer_mode", "lmcache_driven"
_ONE_HEAD_SIZE = "assumes that every layer caches num_key_value_heads x head_dim of config.json"
_FIRST_LAYER = "assumes that every layer's cache has the shape of the first layer's"
_UNSEEN = "was not seen to move a cache whose layers differ"
# The other connectors, and why they are refused.
REFUSED = {
    "ExampleHiddenStatesConnector": _UNSEEN,
    "FlexKVConnectorV1": _UNSEEN,
    "HF3FSKVConnector": _FIRST_LAYER,
    "HiSparseConnector": "moves the cache of sparse attention only",
    "LMCacheConnectorV1": _ONE_HEAD_SIZE,
    "MoRIIOConnector": _FIRST_LAYER,
    "MooncakeConnector": _UNSEEN,
    "MooncakeStoreConnector": _UNSEEN,
    "NixlPushConnector": _UNSEEN,
    "SimpleCPUOffloadConnector": _UNSEEN,
}


def check_kv_transfer(vllm_config: "VllmConfig", layout: ModelLayout) -> None:
    """Raise CheckpointError, naming connector and layer, if a connector cannot move the cache."""
    differing = _differing_layer(layout)
    if differing is None:
        return
    for connector, extra_config in _connectors(vllm_config):
        _check_connector(connector, extra_config, layout, differing)


def _check_connector(
    connector: str, extra_config: dict[str, Any], layout: ModelLayout, differing: int
) -> None:
    """Raise CheckpointError if `connector` cannot move the cache of `layout`.

    `differing` is the index of a layer whose cache differs from the dense model's.
    """
    if connector in LAYER_BY_LAYER:
        return
    if connector in BY_PACKAGE:
        _check_package(connector, BY_PACKAGE[connector])
        if connector == "LMCacheMPConnector":
            _check_lmcache_mode(extra_config)
        return
    if connector not in REFUSED:
        logger.warning(
            "KV connector %s is not vLLM's own: it must not assume that all layers cache alike; "
            "layer %d caches %s numbers a token",
            connector,
            differing,
            _cached(layout.layers[differing]),
        )
        return
    dense = f"{layout.num_key_value_heads} x ({layout.cache_head_dim} + {layout.cache_head_dim})"
    raise CheckpointError(
        f"--kv-transfer-config: {connector} {REFUSED[connector]}; layer {differing} caches "
        f"{_cached(layout.layers[differing])} numbers a token, a dense model of this config "
        f"{dense}; use {', '.join(LAYER_BY_LAYER[1:])} or NixlConnector, or serve a model whose "
        "attention is not compressed"
    )


def _check_package(connector: str, package: Package) -> None:
    """Raise CheckpointError if what is installed is not what `connector` was tested with."""
    vllm = installed_version()
    if not vllm.startswith(tuple(f"{release}." for release in package.releases)):
        reason = f"was not tested with vLLM {vllm}"
    elif (installed := version_of(package.name)) is None:
        reason = f"needs the package {package.name}, which is not installed"
    elif installed != package.version:
        reason = f"was not tested with {package.name} {installed}, which is installed"
    else:
        return
    raise CheckpointError(
        f"--kv-transfer-config: {connector} {reason}; where layers cache differently it is allowed "
        f"with {package.name}=={package.version} and vLLM {' or '.join(package.releases)} only"
    )


def _check_lmcache_mode(extra_config: dict[str, Any]) -> None:
    """Raise CheckpointError unless LMCache is told to move layers by their own shapes."""
    if os.environ.get("LMCACHE_USE_UPSTREAM_MP"):
        raise CheckpointError(
            "LMCACHE_USE_UPSTREAM_MP: is set, so that vLLM would take its own copy of "
            "LMCacheMPConnector, which was not seen to move a cache whose layers differ; unset it"
        )
    if extra_config.get(_LMCACHE_MODE) != _BY_GROUPS:
        raise CheckpointError(
            "--kv-transfer-config: LMCacheMPConnector assumes that every layer's cache has the "
            "shape of the first layer's, unless kv_connector_extra_config has "
            f'"{_LMCACHE_MODE}": "{_BY_GROUPS}"'
        )


def version_of(package: str) -> str | None:
    """The version of a package, None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _differing_layer(layout: ModelLayout) -> int | None:
    """The first layer whose cache differs from that of a dense model with this config."""
    heads, size = layout.num_key_value_heads, layout.cache_head_dim
    for index, layer in enumerate(layout.layers):
        if (layer.value.heads, layer.cache_head_size, layer.value.size) != (heads, size, size):
            return index
    return None


def _cached(layer: LayerLayout) -> str:
    return f"{layer.value.heads} x ({layer.cache_head_size} + {layer.value.size})"


def _connectors(vllm_config: "VllmConfig") -> Iterator[tuple[str, dict[str, Any]]]:
    """The connectors in use with their extra config, those within a MultiConnector one by one."""
    # This flag names a connector, too. vLLM adds it to the config only after the hook has run.
    cache = vllm_config.cache_config
    if cache.kv_offloading_size is not None:
        if cache.kv_offloading_backend == "lmcache":
            yield "LMCacheMPConnector", {}
        elif envs.VLLM_USE_SIMPLE_KV_OFFLOAD:
            yield "SimpleCPUOffloadConnector", {}
    transfer = vllm_config.kv_transfer_config
    if transfer is not None and transfer.kv_connector is not None:
        extra_config = transfer.kv_connector_extra_config
        yield from _within(transfer.kv_connector, extra_config, transfer.kv_connector_module_path)


def _within(
    connector: str, extra_config: dict[str, Any], module: str | None
) -> Iterator[tuple[str, dict[str, Any]]]:
    """`connector` itself, or those within it: a MultiConnector may hold others of its kind.

    A connector of a module that the user names is not vLLM's own, whatever its name is.
    """
    if module and connector in (*LAYER_BY_LAYER, "MultiConnector"):
        connector = f"{module}.{connector}"
    if connector != "MultiConnector":
        yield connector, extra_config
        return
    for child in extra_config.get("connectors", []):
        child_config = child.get("kv_connector_extra_config") or {}
        module = child.get("kv_connector_module_path")
        yield from _within(child.get("kv_connector") or "", child_config, module)

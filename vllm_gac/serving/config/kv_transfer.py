"""Which of vLLM's KV connectors can move a cache whose layers differ.

The lists follow the sources of vLLM 0.32 and 0.33 (distributed/kv_transfer/kv_connector/v1), which
`make check-vllm` compares with those of other releases. Every connector works for a gac model whose
cache has the shape of the dense model's.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from vllm import envs
from vllm.logger import init_logger

from vllm_gac.errors import CheckpointError
from vllm_gac.layout.dims import LayerLayout, ModelLayout

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(f"vllm.{__name__}")  # vLLM configures loggers below its own

# These move each layer's tensor, or the bytes of its pages, whatever its shape.
LAYER_BY_LAYER = (
    "DecodeBenchConnector",
    "ExampleConnector",
    "OffloadingConnector",
)
_ONE_HEAD_SIZE = "assumes that every layer caches num_key_value_heads x head_dim of config.json"
_FIRST_LAYER = "assumes that every layer's cache has the shape of the first layer's"
_UNSEEN = "is not known to move a cache whose layers differ"
# The other connectors, and why they are refused.
REFUSED = {
    "ExampleHiddenStatesConnector": _UNSEEN,
    "FlexKVConnectorV1": _UNSEEN,
    "HF3FSKVConnector": _FIRST_LAYER,
    "HiSparseConnector": "moves the cache of sparse attention only",
    "LMCacheConnectorV1": _ONE_HEAD_SIZE,
    "LMCacheMPConnector": _UNSEEN,
    "MoRIIOConnector": _FIRST_LAYER,
    "MooncakeConnector": _ONE_HEAD_SIZE,
    "MooncakeStoreConnector": _ONE_HEAD_SIZE,
    "NixlConnector": _ONE_HEAD_SIZE,
    "NixlPullConnector": _ONE_HEAD_SIZE,
    "NixlPushConnector": _ONE_HEAD_SIZE,
    "SimpleCPUOffloadConnector": _UNSEEN,
}


def check_kv_transfer(vllm_config: "VllmConfig", layout: ModelLayout) -> None:
    """Raise CheckpointError, naming connector and layer, if a connector cannot move the cache."""
    differing = _differing_layer(layout)
    if differing is None:
        return
    for connector in _connectors(vllm_config):
        check_connector(connector, layout, differing)


def check_connector(connector: str, layout: ModelLayout, differing: int) -> None:
    """Raise CheckpointError if `connector` cannot move the cache of `layout`.

    `differing` is the index of a layer whose cache differs from the dense model's.
    """
    if connector in LAYER_BY_LAYER:
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
        f"{dense}; use {', '.join(LAYER_BY_LAYER[1:-1])} or {LAYER_BY_LAYER[-1]}, or serve a model "
        "whose attention is not compressed"
    )


def _differing_layer(layout: ModelLayout) -> int | None:
    """The first layer whose cache differs from that of a dense model with this config."""
    heads, size = layout.num_key_value_heads, layout.cache_head_dim
    for index, layer in enumerate(layout.layers):
        if (layer.value.heads, layer.cache_head_size, layer.value.size) != (heads, size, size):
            return index
    return None


def _cached(layer: LayerLayout) -> str:
    return f"{layer.value.heads} x ({layer.cache_head_size} + {layer.value.size})"


def _connectors(vllm_config: "VllmConfig") -> Iterator[str]:
    """Names of the connectors in use, those within a MultiConnector one by one."""
    # This flag names a connector, too. vLLM adds it to the config only after the hook has run.
    cache = vllm_config.cache_config
    if cache.kv_offloading_size is not None:
        if cache.kv_offloading_backend == "lmcache":
            yield "LMCacheMPConnector"
        elif envs.VLLM_USE_SIMPLE_KV_OFFLOAD:
            yield "SimpleCPUOffloadConnector"
    transfer = vllm_config.kv_transfer_config
    if transfer is None or transfer.kv_connector is None:
        return
    if transfer.kv_connector != "MultiConnector":
        yield transfer.kv_connector
        return
    for child in transfer.kv_connector_extra_config.get("connectors", []):
        yield child.get("kv_connector", "")

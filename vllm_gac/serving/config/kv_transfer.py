"""Which of vLLM's KV connectors can move a cache whose layers differ.

By the sources of vLLM 0.32 (distributed/kv_transfer/kv_connector/v1). Any of them serves a model
whose cache has the shape that a dense model of its config would have.
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

# These take every layer's tensor, or the bytes of its pages, as they are.
LAYER_BY_LAYER = (
    "DecodeBenchConnector",
    "ExampleConnector",
    "OffloadingConnector",
)
_ONE_HEAD_SIZE = "takes all layers to cache num_key_value_heads x head_dim of config.json"
_FIRST_LAYER = "takes the cache of all layers to be shaped as that of the first one"
_UNSEEN = "has not been seen to move a cache whose layers differ"
# What the others do instead.
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
    """Raise CheckpointError naming connector and layer if `layout` is not one it can move."""
    differing = _differing_layer(layout)
    if differing is None:
        return
    for connector in _connectors(vllm_config):
        check_connector(connector, layout, differing)


def check_connector(connector: str, layout: ModelLayout, differing: int) -> None:
    """As `check_kv_transfer`, for a layer that is known to differ from the dense model's."""
    if connector in LAYER_BY_LAYER:
        return
    if connector not in REFUSED:
        logger.warning(
            "KV connector %s is not vLLM's own: it must not take layers to be alike, of which "
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
    """The first layer that caches something else than a dense model of the same config would."""
    heads, size = layout.num_key_value_heads, layout.cache_head_dim
    for index, layer in enumerate(layout.layers):
        if (layer.value.heads, layer.cache_head_size, layer.value.size) != (heads, size, size):
            return index
    return None


def _cached(layer: LayerLayout) -> str:
    return f"{layer.value.heads} x ({layer.cache_head_size} + {layer.value.size})"


def _connectors(vllm_config: "VllmConfig") -> Iterator[str]:
    """By name, those within a MultiConnector each by itself."""
    # Named by this flag, too, but vLLM puts it into its config only after we are asked.
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

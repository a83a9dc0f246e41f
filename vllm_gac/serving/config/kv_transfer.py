"""Which of vLLM's KV connectors can move a cache whose layers differ.

docs/kv-transfer.md says what was tried with each connector. Every connector works for a gac model
whose cache has the shape of the dense model's.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from vllm import envs

from vllm_gac.errors import CheckpointError
from vllm_gac.errors.sanitize import sanitize
from vllm_gac.layout.dims import ModelLayout
from vllm_gac.serving.registration import installed_version

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# The connectors that were seen to move layers that differ, and the start of the vLLM versions that
# they were seen with. Others may take config.json's heads, or the first layer's, for all layers.
SEEN_TO_WORK = {
    "DecodeBenchConnector": "",
    "ExampleConnector": "",
    "OffloadingConnector": "",
    "NixlConnector": "0.32.",
    "NixlPullConnector": "0.32.",
}
_TO_MEMORY = "CPUOffloadingSpec"  # by default an OffloadingConnector keeps pages there


def check_kv_transfer(vllm_config: "VllmConfig", layout: ModelLayout) -> None:
    """Raise CheckpointError, naming connector and layer, if a connector may not move the cache."""
    heads, size = layout.num_key_value_heads, layout.cache_head_dim
    caches = [(x.value.heads, x.cache_head_size, x.value.size) for x in layout.layers]
    index = next((i for i, cache in enumerate(caches) if cache != (heads, size, size)), None)
    if index is None:
        return
    layer = layout.layers[index]
    version = installed_version()
    for connector in _connectors(vllm_config):
        if not version.startswith(SEEN_TO_WORK.get(connector, "none")):
            raise CheckpointError(
                f"--kv-transfer-config: {connector} was not seen to move layers that differ with "
                f"vLLM {version}; layer {index} caches {layer.value.heads} x "
                f"({layer.cache_head_size} + {layer.value.size}) numbers a token, a dense model of "
                f"this config {heads} x ({size} + {size}); use OffloadingConnector with "
                f"{_TO_MEMORY}, or NixlConnector with vLLM 0.32, or serve a model whose attention "
                "is not compressed"
            )


def _connectors(vllm_config: "VllmConfig") -> Iterator[str]:
    """The connectors in use, those within a MultiConnector one by one."""
    # This flag names a connector, too. vLLM adds it to the config only after the hook has run.
    cache = vllm_config.cache_config
    if cache.kv_offloading_size is not None:
        if cache.kv_offloading_backend == "lmcache":
            yield "LMCacheMPConnector"
        elif envs.VLLM_USE_SIMPLE_KV_OFFLOAD:
            yield "SimpleCPUOffloadConnector"
    transfer = vllm_config.kv_transfer_config
    if transfer is not None and transfer.kv_connector is not None:
        extra_config, module = transfer.kv_connector_extra_config, transfer.kv_connector_module_path
        yield from _within(transfer.kv_connector, extra_config, module)


def _within(connector: str, extra_config: dict[str, Any], module: str | None) -> Iterator[str]:
    """`connector` itself, or those within it: a MultiConnector may hold others of its kind.

    A connector of a module that the user names is not vLLM's own, whatever its name is. Nor was an
    OffloadingConnector tried that keeps pages elsewhere: it names files by the model and its dtype,
    so those of another compression would be read.
    """
    spec = extra_config.get("spec_module_path") or extra_config.get("spec_name", _TO_MEMORY)
    if connector == "OffloadingConnector" and spec != _TO_MEMORY:
        connector = f"OffloadingConnector with {sanitize(spec)}"
    if module or connector != "MultiConnector":
        yield f"{module}.{connector}" if module else connector
        return
    children = extra_config.get("connectors", [])
    if not isinstance(children, list) or not all(isinstance(child, dict) for child in children):
        raise CheckpointError(
            "--kv-transfer-config: MultiConnector: connectors: expected a list of objects, each "
            "with a kv_connector"
        )
    for child in children:
        child_config = child.get("kv_connector_extra_config") or {}
        child_module = child.get("kv_connector_module_path")
        yield from _within(child.get("kv_connector") or "", child_config, child_module)

"""Entry point `vllm.stat_logger_plugins`: what is served, as `gac_*` gauges on /metrics.

Everything here follows from the layout and the cache config, so the front-end process can publish
it without asking a worker. With several API servers each publishes the same values; the merged
gauge is their most recent one, so it counts once whichever of them answers a scrape.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from prometheus_client import REGISTRY, Gauge
from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import StatLoggerBase

from vllm_gac import __version__
from vllm_gac.inspection import aligned_dims
from vllm_gac.kernels.reference import CacheGeometry
from vllm_gac.kernels.select import STOCK
from vllm_gac.layout import LayerLayout, ModelLayout, layout_of
from vllm_gac.registration import ARCHITECTURE
from vllm_gac.serving.hf_layout import layout_of_hf


class GacStatLogger(StatLoggerBase):
    """Sets the gauges once, when the engine is up.

    Other models get the one of their room, which is what a compressed model is compared by.
    """

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        self.vllm_config = vllm_config
        self.engine_index = engine_index

    def log_engine_initialized(self) -> None:
        """Publish the gauges of the model this engine serves."""
        model_config, cache_config = self.vllm_config.model_config, self.vllm_config.cache_config
        name = model_config.served_model_name
        model = str(name[0] if isinstance(name, list) else name)
        if (room := cache_config.kv_cache_size_tokens) is not None:
            text = "Tokens that fit in the KV cache of one engine."
            _gauge("gac_kv_cache_tokens", text, "engine").labels(model, self.engine_index).set(room)
        if ARCHITECTURE not in (model_config.hf_config.architectures or []):
            return
        layout = layout_of_hf(model_config.hf_config)
        dtype = cache_config.cache_dtype
        kv_bytes = 1 if dtype.startswith(("fp8", "int8")) else _bytes(model_config.dtype)
        _publish(layout, _dense(model_config.hf_config.to_dict(), layout), model, kv_bytes)
        loader_config = self.vllm_config.load_config.model_loader_extra_config
        _publish_kernels(layout, model, loader_config)

    def record(self, *args: Any, **kwargs: Any) -> None:
        """Nothing changes from step to step."""


def _bytes(dtype: torch.dtype) -> int:
    return torch.empty(0, dtype=dtype).element_size()


def _dense(raw_config: Mapping[str, Any], layout: ModelLayout) -> ModelLayout:
    """The model before compression: config.json keeps its dims, all but the head size."""
    changes: dict[str, Any] = {"gac": None, "architectures": [], "head_dim": layout.head_dim}
    return layout_of({**raw_config, **changes})


def _publish(layout: ModelLayout, dense: ModelLayout, model: str, kv_bytes: int) -> None:
    aligned, dims = aligned_dims(layout)
    info = _gauge("gac_model_info", "The served gac model.", "version", "layers")
    info.labels(model, __version__, str(len(layout.layers))).set(1)
    for metric, text, value in (
        ("gac_kv_bytes_per_token", "KV cache bytes per token.", layout.kv_elements * kv_bytes),
        (
            "gac_dense_kv_bytes_per_token",
            "The same before compression.",
            dense.kv_elements * kv_bytes,
        ),
        ("gac_parameters", "Weights of the served model.", layout.parameters),
        ("gac_dense_parameters", "The same before compression.", dense.parameters),
        ("gac_aligned_fraction", "Share of dims that are multiples of 8.", aligned / dims),
    ):
        _gauge(metric, text).labels(model).set(value)


def _publish_kernels(layout: ModelLayout, model: str, loader_config: dict[str, Any]) -> None:
    """Layers by their kernels and class of heads: a model has few classes."""
    text = "Layers by attention backend, its decode and prefill kernels, and key and value heads."
    names = ("backend", "decode", "prefill", "keys", "values")
    gauge = _gauge("gac_attention_layers", text, *names)
    kinds = Counter(_attention(layout, layer, loader_config) for layer in layout.layers)
    for kind, layers in kinds.items():
        gauge.labels(model, *kind).set(layers)


def _attention(
    layout: ModelLayout, layer: LayerLayout, loader_config: dict[str, Any]
) -> tuple[str, str, str, str, str]:
    # Not at the top: the front end has no other use for vLLM's layers.
    from vllm.platforms import current_platform

    from vllm_gac.serving.attention import attention_kernels

    key, value = layer.key, layer.value
    geometry = CacheGeometry(
        query_heads=layer.query_heads,
        query_size=layout.query_size(layer),
        key_heads=key.heads,
        key_size=key.size,
        value_heads=value.heads,
        value_size=value.size,
    )
    kernels = attention_kernels(geometry, key.form == "latent", loader_config)
    backend = "GAC" if current_platform.is_cuda() else "GAC_REFERENCE"
    if kernels.backend == STOCK:
        backend = "vllm"
    heads = f"{key.form} {key.heads}x{key.size}", f"{value.heads}x{value.size}"
    return backend, kernels.decode, kernels.prefill, *heads


def _gauge(name: str, text: str, *labels: str) -> Gauge:
    """The gauge `name`, created on first use: an engine may be initialized twice in a process."""
    known = REGISTRY._names_to_collectors.get(name)
    if isinstance(known, Gauge):
        return known
    return Gauge(name, text, ["model_name", *labels], multiprocess_mode="mostrecent")

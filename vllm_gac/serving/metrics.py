"""Entry point `vllm.stat_logger_plugins`: what is served, as `gac_*` gauges on /metrics.

Everything here follows from the layout, so the front-end process can publish it without asking
a worker. With several API servers each publishes the same values; the merged gauge is their
most recent one.
"""

from typing import Any

import torch
from prometheus_client import REGISTRY, Gauge
from vllm.config import VllmConfig
from vllm.v1.metrics.loggers import StatLoggerBase

from vllm_gac import __version__
from vllm_gac.inspection import aligned_dims
from vllm_gac.layout import ModelLayout
from vllm_gac.registration import ARCHITECTURE
from vllm_gac.serving.config_hook import layout_of_hf


class GacStatLogger(StatLoggerBase):
    """Sets the gauges once, when the engine is up; other models get none."""

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        self.vllm_config = vllm_config

    def log_engine_initialized(self) -> None:
        """Publish the gauges of the model this engine serves."""
        model_config = self.vllm_config.model_config
        if ARCHITECTURE not in (model_config.hf_config.architectures or []):
            return
        name = model_config.served_model_name
        name = name[0] if isinstance(name, list) else name
        dtype = self.vllm_config.cache_config.cache_dtype
        kv_bytes = 1 if dtype.startswith(("fp8", "int8")) else _bytes(model_config.dtype)
        _publish(layout_of_hf(model_config.hf_config), str(name), kv_bytes)

    def record(self, *args: Any, **kwargs: Any) -> None:
        """Nothing changes from step to step."""


def _bytes(dtype: torch.dtype) -> int:
    return torch.empty(0, dtype=dtype).element_size()


def _publish(layout: ModelLayout, model: str, kv_bytes: int) -> None:
    dense_kv = 2 * layout.num_key_value_heads * layout.head_dim * len(layout.layers)
    aligned, dims = aligned_dims(layout)
    info = _gauge("gac_model_info", "The served gac model.", "version", "layers")
    info.labels(model, __version__, str(len(layout.layers))).set(1)
    for metric, text, value in (
        ("gac_kv_bytes_per_token", "KV cache bytes per token.", layout.kv_elements * kv_bytes),
        ("gac_dense_kv_bytes_per_token", "The same before compression.", dense_kv * kv_bytes),
        ("gac_parameters", "Weights of the served model.", layout.parameters),
        ("gac_aligned_fraction", "Share of dims that are multiples of 8.", aligned / dims),
    ):
        _gauge(metric, text).labels(model).set(value)


def _gauge(name: str, text: str, *labels: str) -> Gauge:
    """The gauge `name`, created on first use: an engine may be initialized twice in a process."""
    known = REGISTRY._names_to_collectors.get(name)
    if isinstance(known, Gauge):
        return known
    return Gauge(name, text, ["model_name", *labels], multiprocess_mode="mostrecent")

"""Entry point `vllm.stat_logger_plugins`: describes the served model in gauges and one log line.

The values of the `gac_*` gauges follow from the layout and the cache config, so the front-end
process publishes them without calling a worker. With several API servers each publishes the same
values. The gauges are merged to the most recent value, so nothing is counted twice. Only the first
API server writes the log line.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any, TypeAlias

from prometheus_client import REGISTRY, Gauge
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.metrics.loggers import StatLoggerBase

from vllm_gac.alignment.rules import aligned_dims
from vllm_gac.gpu.attention_choice import STOCK
from vllm_gac.layout.cache_geometry import CacheGeometry
from vllm_gac.layout.dims import LayerLayout, ModelLayout, layout_of
from vllm_gac.layout.families import ARCHITECTURE
from vllm_gac.layout.tensor_parallel import with_heads_of
from vllm_gac.serving.gac_config import GacConfig
from vllm_gac.serving.vllm_internals import is_first_api_server
from vllm_gac.version import version

logger = init_logger(f"vllm.{__name__}")  # vLLM configures loggers below its own

# Number of layers by attention backend, decode kernel, prefill kernel, key heads and value heads.
_Kernels: TypeAlias = Counter[tuple[str, str, str, str, str]]


class GacStatLogger(StatLoggerBase):
    """Sets the gauges and logs one line when the engine has started.

    Models that are not gac models get only the gauge gac_kv_cache_tokens, for comparison.
    """

    def __init__(self, vllm_config: VllmConfig, engine_index: int = 0) -> None:
        self.vllm_config = vllm_config
        self.engine_index = engine_index

    def log_engine_initialized(self) -> None:
        """Publish the gauges of the model that this engine serves, and log one line."""
        model_config, cache_config = self.vllm_config.model_config, self.vllm_config.cache_config
        names = model_config.served_model_name
        model = str(names[0] if isinstance(names, list) else names)
        if (room := cache_config.kv_cache_size_tokens) is not None:
            text = "Tokens that fit in the KV cache of one engine; published for every model."
            _gauge("gac_kv_cache_tokens", text, "engine").labels(model, self.engine_index).set(room)
        if ARCHITECTURE not in (model_config.hf_config.architectures or []):
            return
        config = GacConfig.of(model_config.hf_config)
        served, raw_config = config.served, config.to_dict()
        kv_bytes = (
            _kv_token_bytes(served, self.vllm_config),
            _kv_token_bytes(_dense(raw_config, served), self.vllm_config),
        )
        kernels = Counter(_attention(served, layer, self.vllm_config) for layer in served.layers)
        # A head that several GPUs repeat takes memory on each, in a dense model, too. But its
        # parameters are counted once.
        layout = with_heads_of(served, config.stored)
        dense = _dense(raw_config, layout)
        _publish(layout, dense, model, kv_bytes)
        _publish_kernels(kernels, model)
        # Other data-parallel engines and API servers would repeat the line.
        if self.engine_index == 0 and is_first_api_server(self.vllm_config):
            logger.info("%s", start_line(layout, dense, kv_bytes, room, kernels))

    def record(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: no value changes from step to step."""


def _dense(raw_config: Mapping[str, Any], layout: ModelLayout) -> ModelLayout:
    """The dense layout. config.json keeps its dims; KV heads and their size are `layout`'s."""
    changes: dict[str, Any] = {"gac": None, "architectures": [], "head_dim": layout.head_dim}
    return layout_of({**raw_config, **changes, "num_key_value_heads": layout.num_key_value_heads})


def _kv_token_bytes(layout: ModelLayout, vllm_config: VllmConfig) -> int:
    """Bytes of KV cache that one token takes in all layers of `layout`.

    vLLM leaves the layers of --kv-cache-dtype-skip-layers in the model's dtype: those whose index
    is listed, and with "sliding_window" all that have a window.
    """
    cache, model_dtype = vllm_config.cache_config, vllm_config.model_config.dtype
    skipped = set(cache.kv_cache_dtype_skip_layers)
    if "sliding_window" in skipped and cache.sliding_window is not None:
        skipped |= set(map(str, range(len(layout.layers))))
    model_bytes = model_dtype.itemsize
    cached = {"auto": model_bytes, "float16": 2, "bfloat16": 2}.get(cache.cache_dtype, 1)
    return sum(
        layer.kv_elements * (model_bytes if str(index) in skipped else cached)
        for index, layer in enumerate(layout.layers)
    )


def start_line(
    layout: ModelLayout,
    dense: ModelLayout,
    kv_bytes: tuple[int, int],
    room: int | None,
    kernels: _Kernels,
) -> str:
    """The log line that compares the served model with the dense one, of before compression.

    `kv_bytes`: bytes of KV cache that one token takes, and would take before compression. `room`:
    tokens that fit in the KV cache; None if it is not known. `kernels`: number of layers by
    backend, kernels and heads.
    """
    share = kv_bytes[0] / kv_bytes[1]
    parts = [
        f"{layout.parameters:,} parameters, {layout.parameters / dense.parameters:.1%} of "
        f"{dense.parameters:,} before compression",
        f"{kv_bytes[0]:,} bytes of KV cache per token, {share:.1%} of {kv_bytes[1]:,}",
    ]
    if room is not None:
        parts.append(
            f"room for {room:,} tokens, where the dense model's cache would hold "
            f"{room * share:,.0f}"
        )
    layers = ", ".join(
        f"{count} x {backend} ({decode} decode, {prefill} prefill; keys {keys}, values {values})"
        for (backend, decode, prefill, keys, values), count in kernels.most_common()
    )
    return f"vllm-gac {version()}: {'; '.join(parts)}; attention by layer: {layers}"


def _publish(
    layout: ModelLayout, dense: ModelLayout, model: str, kv_bytes: tuple[int, int]
) -> None:
    aligned, dims = aligned_dims(layout)
    text = "Always 1; its label is the version of vllm-gac that serves the model."
    _gauge("gac_model_info", text, "version").labels(model, version()).set(1)
    for metric, text, value in (
        (
            "gac_kv_token_bytes",
            "Bytes of KV cache that one token takes, on all GPUs together.",
            kv_bytes[0],
        ),
        (
            "gac_dense_kv_token_bytes",
            "Bytes of KV cache that one token would take in the model before compression.",
            kv_bytes[1],
        ),
        ("gac_parameters", "Number of parameters of the served model.", layout.parameters),
        (
            "gac_dense_parameters",
            "Number of parameters of the model before compression.",
            dense.parameters,
        ),
        (
            "gac_aligned_dims_ratio",
            "Share of the head sizes, ranks and MLP widths that are multiples of 8, 0 to 1.",
            aligned / dims,
        ),
    ):
        _gauge(metric, text).labels(model).set(value)


def _publish_kernels(kernels: _Kernels, model: str) -> None:
    """Publish the number of layers by kernels and class of heads. A model has few classes."""
    text = (
        "Number of layers by attention backend, decode kernel, prefill kernel and the form, "
        "number and size of key and value heads."
    )
    names = ("backend", "decode", "prefill", "keys", "values")
    gauge = _gauge("gac_attention_layers", text, *names)
    for kind, layers in kernels.items():
        gauge.labels(model, *kind).set(layers)


def _attention(
    layout: ModelLayout, layer: LayerLayout, vllm_config: "VllmConfig"
) -> tuple[str, str, str, str, str]:
    # Not at the top: importing vLLM's layers is slow, and the front end needs them only here.
    from vllm.platforms import current_platform

    from vllm_gac.serving.attention.layer import kernels_of_gac_layer

    key, value = layer.key, layer.value
    kernels = kernels_of_gac_layer(CacheGeometry.of(layout, layer), vllm_config)
    backend = "GAC" if current_platform.is_cuda() else "GAC_REFERENCE"
    if kernels.backend == STOCK:
        backend = "vllm"
    heads = f"{key.form} {key.heads}x{key.size}", f"{value.heads}x{value.size}"
    return backend, kernels.decode, kernels.prefill, *heads


def _gauge(name: str, text: str, *labels: str) -> Gauge:
    """The gauge `name`, created on first use. A process may initialize several engines."""
    known = REGISTRY._names_to_collectors.get(name)
    if isinstance(known, Gauge):
        return known
    return Gauge(name, text, ["model_name", *labels], multiprocess_mode="mostrecent")

"""The gauges and the log line of the stat logger, without a server."""

import re
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.model_files import config, gac_config
from vllm_gac.layout.dims import layout_of

pytest.importorskip("vllm")


def published(
    raw: dict[str, Any],
    cache_dtype: str = "auto",
    *,
    engine: int = 1,
    rank: int = 0,
    twice: bool = True,
    skipped: tuple[str, ...] = (),
    window: int | None = None,
    dtype: str = "bfloat16",
) -> dict[str, dict[str, float]]:
    """The gauges after an engine has started: {metric: {labels without the model's: value}}.

    `engine` is the engine's index, `rank` that of the API server that publishes the gauges.
    """
    import torch
    from prometheus_client import REGISTRY
    from transformers import CONFIG_MAPPING

    from vllm_gac.serving.metrics import GacStatLogger

    known = REGISTRY._names_to_collectors
    for gauge in {known[name] for name in list(known) if name.startswith("gac_")}:
        REGISTRY.unregister(gauge)
    hf_config = CONFIG_MAPPING[raw["model_type"]].from_dict(raw)
    model = SimpleNamespace(hf_config=hf_config, served_model_name="m", dtype=getattr(torch, dtype))
    cache = SimpleNamespace(
        cache_dtype=cache_dtype,
        kv_cache_size_tokens=1000,
        kv_cache_dtype_skip_layers=list(skipped),
        sliding_window=window,
    )
    load = SimpleNamespace(model_loader_extra_config={})
    vllm_config: Any = SimpleNamespace(
        model_config=model,
        cache_config=cache,
        load_config=load,
        attention_config=SimpleNamespace(backend=None),
        parallel_config=SimpleNamespace(_api_process_rank=rank),
    )
    logger = GacStatLogger(vllm_config, engine_index=engine)
    logger.log_engine_initialized()
    if twice:
        logger.log_engine_initialized()  # a process may initialize several engines
    gauges: dict[str, dict[str, float]] = {}
    for metric in REGISTRY.collect():
        if metric.name.startswith("gac_"):
            assert metric.documentation.endswith(".")
            assert "the same" not in metric.documentation
            assert re.search(r"_(ratio|bytes|tokens|parameters|layers|info)$", metric.name)
        for sample in metric.samples:
            if sample.name.startswith("gac_"):
                labels = dict(sample.labels)
                assert labels.pop("model_name") == "m"
                key = " ".join(labels[name] for name in sorted(labels))
                gauges.setdefault(sample.name, {})[key] = sample.value
    return gauges


def test_another_model_gets_only_the_gauge_of_cache_tokens() -> None:
    raw = config() | {"architectures": ["LlamaForCausalLM"]}
    assert published(raw) == {"gac_kv_cache_tokens": {"1": 1000}}


def test_a_gac_model_is_compared_with_its_dense_model() -> None:
    raw = gac_config()
    layout, dense = layout_of(raw), layout_of(config())
    gauges = published(raw)
    assert gauges["gac_kv_token_bytes"] == {"": 2 * layout.kv_elements}
    assert gauges["gac_dense_kv_token_bytes"] == {"": 2 * dense.kv_elements}
    assert gauges["gac_parameters"] == {"": layout.parameters}
    assert gauges["gac_dense_parameters"] == {"": dense.parameters}
    assert gauges["gac_parameters"] != gauges["gac_dense_parameters"]
    assert gauges["gac_kv_cache_tokens"] == {"1": 1000}


def test_an_fp8_cache_takes_one_byte_per_number() -> None:
    layout = layout_of(gac_config())
    gauges = published(gac_config(), cache_dtype="fp8_e4m3")
    assert gauges["gac_kv_token_bytes"] == {"": layout.kv_elements}


@pytest.mark.parametrize(
    ("skipped", "window", "wide"),
    [(("1",), None, {1}), (("0", "sliding_window"), None, {0}), (("sliding_window",), 64, {0, 1})],
)
def test_layers_that_are_not_quantized_take_the_models_dtype(
    skipped: tuple[str, ...], window: int | None, wide: set[int]
) -> None:
    layers = layout_of(gac_config()).layers
    gauges = published(gac_config(), "fp8", skipped=skipped, window=window)
    bytes_ = sum(layer.kv_elements * (1 + (i in wide)) for i, layer in enumerate(layers))
    assert gauges["gac_kv_token_bytes"] == {"": bytes_}


def test_a_half_precision_cache_of_an_fp32_model_takes_two_bytes_per_number() -> None:
    layout = layout_of(gac_config())
    gauges = published(gac_config(), "bfloat16", dtype="float32")
    assert gauges["gac_kv_token_bytes"] == {"": 2 * layout.kv_elements}
    assert published(gac_config(), dtype="float32")["gac_kv_token_bytes"] == {
        "": 4 * layout.kv_elements
    }


def test_layers_are_counted_by_kernels_and_heads() -> None:
    raw = gac_config()
    layers = layout_of(raw).layers
    counts = published(raw)["gac_attention_layers"]
    assert sum(counts.values()) == len(layers)
    for layer in layers:
        keys = f"{layer.key.form} {layer.key.heads}x{layer.key.size}"
        values = f"{layer.value.heads}x{layer.value.size}"
        (label,) = set(counts) & {
            f"{backend} {kernel} {keys} {kernel} {values}"  # decode kernel and prefill kernel
            for backend, kernel in (("vllm", "stock"), ("GAC_REFERENCE", "reference"))
        }
        alike = (layer.key.heads, layer.key.size) == (layer.value.heads, layer.value.size)
        if not alike or layer.key.form == "latent":
            assert label.startswith("GAC_REFERENCE")


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The lines that the stat logger logs, whatever other tests did to the logging setup."""
    from vllm_gac.serving import metrics

    lines: list[str] = []
    monkeypatch.setattr(metrics.logger, "info", lambda text, *values: lines.append(text % values))
    return lines


def test_one_log_line_compares_the_served_with_the_dense_model(said: list[str]) -> None:
    layout, dense = layout_of(gac_config()), layout_of(config())
    published(gac_config(), engine=0, twice=False)
    (line,) = said
    kept = layout.kv_elements / dense.kv_elements
    for part in (
        f"{layout.parameters:,} parameters, {layout.parameters / dense.parameters:.1%} of "
        f"{dense.parameters:,} before compression",
        f"{2 * layout.kv_elements:,} bytes of KV cache per token, {kept:.1%} of "
        f"{2 * dense.kv_elements:,}",
        f"room for 1,000 tokens, where the dense model's cache would hold {1000 * kept:,.0f}",
        "1 x GAC_REFERENCE (reference decode, reference prefill; keys latent 2x8, values 2x8)",
    ):
        assert part in line
    assert "\n" not in line


@pytest.mark.parametrize("other", [{"engine": 1}, {"rank": 1}])
def test_further_engines_and_api_servers_do_not_repeat_it(
    other: dict[str, int], said: list[str]
) -> None:
    published(gac_config(), **{"engine": 0, **other})
    assert said == []

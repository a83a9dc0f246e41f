"""The gauges and the log line of the stat logger, without a server."""

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from prometheus_client import REGISTRY
from transformers import CONFIG_MAPPING

from tests.support.model_files import config, gac_config
from vllm_gac import __version__
from vllm_gac.layout.dims import layout_of
from vllm_gac.layout.tensor_parallel import repeated_heads
from vllm_gac.serving import metrics
from vllm_gac.serving.gac_config import GacConfig

RAW = gac_config()
LAYOUT, DENSE = layout_of(RAW), layout_of(config())


def published(
    raw: dict[str, Any] = RAW,
    cache_dtype: str = "auto",
    *,
    engine: int = 1,
    rank: int = 0,
    skipped: tuple[str, ...] = (),
    window: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    engines: int = 1,
    tp: int = 1,
) -> dict[str, dict[str, float]]:
    """The gauges after an engine has started: {metric: {labels without the model's: value}}.

    `engine` is the engine's index, `rank` that of the API server that publishes the gauges.
    """
    collectors = REGISTRY._names_to_collectors
    for gauge in {collectors[name] for name in list(collectors) if name.startswith("gac_")}:
        REGISTRY.unregister(gauge)
    hf_config = CONFIG_MAPPING[raw["model_type"]].from_dict(raw)
    if tp > 1:
        hf_config = GacConfig.of(hf_config)
        hf_config.serve(repeated_heads(LAYOUT, tp))
    vllm_config: Any = SimpleNamespace(
        model_config=SimpleNamespace(hf_config=hf_config, served_model_name="m", dtype=dtype),
        cache_config=SimpleNamespace(
            cache_dtype=cache_dtype,
            kv_cache_size_tokens=1000,
            kv_cache_dtype_skip_layers=list(skipped),
            sliding_window=window,
        ),
        load_config=SimpleNamespace(model_loader_extra_config={}),
        attention_config=SimpleNamespace(backend=None),
        parallel_config=SimpleNamespace(_api_process_rank=rank),
    )
    logger = metrics.GacStatLogger(vllm_config, engine_index=engine)
    for _ in range(engines):
        logger.log_engine_initialized()
    gauges: dict[str, dict[str, float]] = {}
    for metric in REGISTRY.collect():
        if metric.name.startswith("gac_"):
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
    gauges = published(engines=2)  # which one process may initialize
    counts = gauges.pop("gac_attention_layers")
    assert gauges == {
        "gac_kv_token_bytes": {"": 2 * LAYOUT.kv_elements},
        "gac_dense_kv_token_bytes": {"": 2 * DENSE.kv_elements},
        "gac_parameters": {"": LAYOUT.parameters},
        "gac_dense_parameters": {"": DENSE.parameters},
        "gac_kv_cache_tokens": {"1": 1000},
        "gac_aligned_dims_ratio": {"": 6 / 7},
        "gac_model_info": {__version__: 1},
    }
    # Backend, decode kernel, keys, prefill kernel and values; here, every layer is compressed.
    reference = "GAC_REFERENCE reference"
    assert counts == {
        f"{reference} {x.key.form} {x.key.heads}x{x.key.size} reference "
        f"{x.value.heads}x{x.value.size}": 1
        for x in LAYOUT.layers
    }


def test_a_head_that_gpus_repeat_is_cached_on_each_and_is_one_head_of_the_model() -> None:
    gauges, once = published(tp=4), published()
    for name, layout in (("gac_kv_token_bytes", LAYOUT), ("gac_dense_kv_token_bytes", DENSE)):
        assert gauges[name] == {"": 2 * repeated_heads(layout, 4).kv_elements}
    for name in ("gac_parameters", "gac_dense_parameters"):
        assert gauges[name] == once[name]


@pytest.mark.parametrize(
    ("requested", "bytes_each"),
    [
        ({"cache_dtype": "fp8_e4m3"}, (1, 1)),
        ({"cache_dtype": "fp8", "skipped": ("1",)}, (1, 2)),
        ({"cache_dtype": "fp8", "skipped": ("0", "sliding_window")}, (2, 1)),
        ({"cache_dtype": "fp8", "skipped": ("sliding_window",), "window": 64}, (2, 2)),
        ({"cache_dtype": "bfloat16", "dtype": torch.float32}, (2, 2)),
        ({"dtype": torch.float32}, (4, 4)),
    ],
)
def test_a_cached_token_takes_the_bytes_of_the_caches_dtype_in_each_layer(
    requested: dict[str, Any], bytes_each: tuple[int, int]
) -> None:
    layers = zip(LAYOUT.layers, bytes_each, strict=True)
    expected = sum(layer.kv_elements * each for layer, each in layers)
    assert published(**requested)["gac_kv_token_bytes"] == {"": expected}


@pytest.mark.parametrize(
    ("engine", "rank", "lines"), [(0, 0, 1), (1, 0, 0), (0, 1, 0)], ids=["first", "engine", "rank"]
)
def test_one_process_logs_one_line_that_compares_with_the_dense_model(
    engine: int, rank: int, lines: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[str] = []
    monkeypatch.setattr(metrics.logger, "info", lambda text, *values: logged.append(text % values))
    published(engine=engine, rank=rank)
    assert len(logged) == lines
    numbers = (LAYOUT.parameters, DENSE.parameters, 2 * LAYOUT.kv_elements, 2 * DENSE.kv_elements)
    assert all(f"{number:,}" in line for line in logged for number in numbers)

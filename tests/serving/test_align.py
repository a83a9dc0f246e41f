"""Misaligned dims are padded at load time, which does not change what the model computes."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from tests.serving.engines import OPTIONS, answers, assert_same, each_in_engine_process
from tests.serving.models import layer, write_model
from tests.serving.stubs import VllmConfigStub
from vllm_gac.alignment.rules import QuantizationMultiples, padded_layout
from vllm_gac.checkpoint.open import open_checkpoint
from vllm_gac.errors import CheckpointError
from vllm_gac.serving.config.served_layout import align_config

HEAD_DIM = 60
# Keys of the model's own size, latents of one head, selected pairs, latents of two heads.
LAYERS = [
    layer(("rotary", 4, 60), (2, 43), 397, {"mlp.down_proj": 61, "self_attn.q_proj": 93}),
    layer(("latent", 4, 27), (2, 30), 301, {"mlp.gate_proj": 50, "self_attn.k_proj": 37}),
    layer(("rotary", 4, 38), (4, 30), 250),
    layer(("latent", 2, 41), (2, 54), 485),
]
STRATEGIES = ["none", "minimal", "measured"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    gac = {"version": 1, "softmax_scale": HEAD_DIM**-0.5, "head_dim": HEAD_DIM, "layers": LAYERS}
    write_model(tmp_path / "model", LAYERS, gac=gac)
    return tmp_path / "model"


@pytest.mark.slow
def test_padding_keeps_the_served_answers_and_sets_the_size_of_the_cache(model: Path) -> None:
    """In fp32."""
    calls = [(str(model), strategy) for strategy in STRATEGIES]
    served = dict(zip(STRATEGIES, each_in_engine_process(_served, calls), strict=True))
    for strategy, (answered, head_size, cached_tokens) in served.items():
        assert_same(answered, served["none"][0], 1e-4)
        padded = padded_layout(open_checkpoint(model).layout, strategy)
        assert head_size == padded.cache_head_dim
        assert cached_tokens == pytest.approx(2**30 / (4 * padded.kv_elements), rel=1e-3)


def _served(model: str, strategy: str) -> Any:
    """Answers, and vLLM's head size and tokens in its cache."""
    from vllm import LLM

    llm = LLM(model, model_loader_extra_config={"align": strategy}, **OPTIONS)
    config = llm.llm_engine.vllm_config
    head_size = config.model_config.get_head_size()
    return [answers(llm), head_size, config.cache_config.kv_cache_size_tokens]


def aligned(
    directory: Path, requested: dict[str, Any] | None = None, **options: Any
) -> VllmConfigStub:
    """The padded config of a server with these loader options and `requested` other ones."""
    config = VllmConfigStub(directory, options, **requested or {})
    align_config(config)  # type: ignore[arg-type]
    return config


@pytest.mark.parametrize(
    ("options", "strategy"),
    [
        ({}, "minimal"),
        ({"align": "none"}, "none"),
        ({"align": "measured", "gpu": "h200"}, "measured"),
    ],
)
def test_the_config_carries_the_padded_and_the_stored_layout_and_streams_the_padded(
    model: Path, options: dict[str, Any], strategy: Any
) -> None:
    on_disk = open_checkpoint(model).layout
    config = aligned(model, **options)
    padded = padded_layout(on_disk, strategy)
    sent = pickle.loads(pickle.dumps(config.model_config.hf_config))
    assert (config.stored, config.served) == (sent.stored, sent.served) == (on_disk, padded)
    assert sent.head_dim == padded.cache_head_dim
    if strategy != "none":
        assert config.model_config.model_arch_config[0] == padded.cache_head_dim
    align_config(config)  # type: ignore[arg-type] # the hook may run twice
    assert (config.stored, config.served) == (on_disk, padded)
    expected = padded.tensors()
    # This layer has the model's own frequencies: one row for all heads.
    table = "model.layers.0.self_attn.rope_inv_freq"
    if table in expected:
        expected[table] = (1, *expected[table][1:])
    for _ in range(2):  # reloading makes a new loader
        assert {name: tuple(tensor.shape) for name, tensor in config.stream()} == expected


def test_weights_from_a_trainer_are_refused_where_dims_are_padded(model: Path) -> None:
    trained = {"trainer": object()}
    with pytest.raises(CheckpointError, match=r"^--weight-transfer-config"):
        aligned(model, trained)
    config = aligned(model, trained, align="none")
    assert config.served == config.stored


def test_dims_are_padded_for_each_rank_and_to_the_multiples_of_quantization(model: Path) -> None:
    on_disk = open_checkpoint(model).layout
    widths = [layer.intermediate_size for layer in aligned(model, {"tp": 2}).served.layers]
    assert widths == [400, 304, 256, 496]
    fp8 = {"quantization": "fp8_per_tensor", "cache_dtype": "fp8"}
    multiples = QuantizationMultiples(linear=16, cache=16)
    served = aligned(model, fp8).served
    assert served == padded_layout(on_disk, "minimal", quantized=multiples)
    assert all(dim % 16 == 0 for _, _, dim in served.dims())
    assert aligned(model, fp8, align="none").served == on_disk


def test_packed_tensors_are_not_padded(model: Path) -> None:
    raw = json.loads((model / "config.json").read_text())
    quantized = raw | {"quantization_config": {"quant_method": "fp8"}}
    (model / "config.json").write_text(json.dumps(quantized))
    config = aligned(model)
    assert config.served == config.stored
    with pytest.raises(CheckpointError, match="align minimal"):
        aligned(model, align="minimal")


def test_an_unknown_strategy_is_named(model: Path) -> None:
    with pytest.raises(CheckpointError, match=r"--model-loader-extra-config: align: .*'best'"):
        aligned(model, align="best")

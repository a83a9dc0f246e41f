"""The served layout: padded, also for quantization, and split over ranks; tensors follow it."""

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.config.quantization import resolve_quantization_config
from vllm.model_executor.models.utils import PPMissingLayer

from tests.serving.engines import OPTIONS, answers, assert_same, each_in_engine_process
from tests.serving.models import layer, layout_with, write_model
from tests.serving.stubs import VllmConfigStub
from tests.support.dense_models import change_config
from tests.support.stored_models import change_tensors
from vllm_gac.alignment.rules import NOT_QUANTIZED, QuantizationMultiples, padded_layout
from vllm_gac.checkpoint.open import open_checkpoint
from vllm_gac.errors import CheckpointError, GacError
from vllm_gac.layout.tensor_parallel import repeated_heads
from vllm_gac.serving.config.served_layout import (
    align_config,
    requested_quantization,
    resolve_cache_dtype,
    shard_config,
)

HEAD_DIM = 60
# Keys of the model's own size, latents of one head, selected pairs, latents and keys of two heads.
LAYERS = [
    layer(("rotary", 4, 60), (2, 43), 398, {"mlp.down_proj": 61, "self_attn.q_proj": 93}),
    layer(("latent", 4, 27), (2, 30), 302, {"mlp.gate_proj": 50, "self_attn.k_proj": 37}),
    layer(("rotary", 4, 38), (4, 30), 250),
    layer(("latent", 2, 41), (2, 54), 486),
    layer(("rotary", 2, 30), (1, 35), 250, {"self_attn.v_proj": 21}),
]
STRATEGIES = ["none", "minimal", "measured"]
PACKED = {"quantization_config": {"quant_method": "fp8"}}


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


def configured(
    directory: Path, options: dict[str, Any] | None = None, **requested: Any
) -> VllmConfigStub:
    """A server's config, padded and split, with these loader `options` and `requested` others."""
    config = VllmConfigStub(directory, options, **requested)
    for _ in range(2):  # the hook may run twice
        align_config(config)  # type: ignore[arg-type]
        shard_config(config)  # type: ignore[arg-type]
    return config


@pytest.mark.parametrize(
    ("options", "strategy", "tp"),
    [
        ({"align": "none"}, "none", 1),
        ({"align": "measured", "gpu": "h200"}, "measured", 1),
        *(({}, "minimal", tp) for tp in (1, 2, 4, 8)),
    ],
)
def test_config_carries_both_layouts_and_loader_streams_the_served_one(
    model: Path, options: dict[str, Any], strategy: Any, tp: int
) -> None:
    stored = open_checkpoint(model).layout
    served = repeated_heads(padded_layout(stored, strategy, tp=tp), tp)
    config = configured(model, options, tp=tp)
    sent = pickle.loads(pickle.dumps(config.model_config.hf_config))
    assert (config.stored, config.served) == (sent.stored, sent.served) == (stored, served)
    assert sent.head_dim == served.cache_head_dim
    if strategy != "none":
        assert config.model_config.model_arch_config == (served.cache_head_dim, max(tp, 4))
    expected = served.tensors()
    # This layer has the model's own frequencies: one row for all heads.
    table = "model.layers.0.self_attn.rope_inv_freq"
    if table in expected:
        expected[table] = (1, *expected[table][1:])
    for _ in range(2):  # reloading makes a new loader
        assert {name: tuple(tensor.shape) for name, tensor in config.stream()} == expected


@pytest.mark.parametrize(
    ("options", "requested", "reason"),
    [
        ({"align": "best"}, {}, r"--model-loader-extra-config: align: .*'best'"),
        ({"gpu": "h2000"}, {}, "h2000"),
        ({}, {"trainer": object()}, "^--weight-transfer-config"),
        ({"align": "minimal"}, {"packed": True}, "align minimal"),
        ({"align": "none"}, {"tp": 2, "lora": object()}, "layer 4 .*LoRA"),
        ({"align": "none"}, {"tp": 2, "trainer": object()}, "layer 4 .*trainer"),
        ({}, {"tp": 2, "packed": True}, "layer 4 .*quantized"),
        ({}, {"pp": 6}, "--pipeline-parallel-size 6: .*5 layers"),
    ],
)
def test_a_layout_that_cannot_be_served_is_refused(
    model: Path, options: dict[str, Any], requested: dict[str, Any], reason: str
) -> None:
    if requested.pop("packed", False):
        change_config(model, **PACKED)
    with pytest.raises(GacError, match=reason):
        configured(model, options, **requested)


def test_dims_of_packed_tensors_and_of_weights_from_a_trainer_are_not_padded(model: Path) -> None:
    config = configured(model, {"align": "none"}, trainer=object())
    assert config.served == config.stored
    change_config(model, **PACKED)
    config = configured(model)
    assert config.served == config.stored


def test_pipeline_stage_reads_its_layers_only(model: Path) -> None:
    """The layers of other stages hold NaN, which those stages would report."""
    others = ("model.layers.0.mlp.", "model.layers.2.mlp.", "model.norm", "lm_head")

    def break_others(tensors: dict[str, torch.Tensor]) -> None:
        for name in tensors:
            if name.startswith(others):
                tensors[name].fill_(torch.nan)

    change_tensors(model / "model.safetensors", break_others)
    stage = nn.ModuleDict({"model": nn.ModuleDict(), "lm_head": PPMissingLayer()})
    missing = (PPMissingLayer() for _ in range(3))
    stage["model"]["layers"] = nn.ModuleList([PPMissingLayer(), nn.Identity(), *missing])
    stage["model"]["norm"] = PPMissingLayer()
    config = VllmConfigStub(model)
    own = ("model.layers.1.", "model.embed")
    expected = {name for name in config.stored.tensors() if name.startswith(own)}
    assert {name for name, _ in config.stream(stage)} == expected
    with pytest.raises(CheckpointError, match="contains NaN"):
        list(config.stream())


# ---- quantization ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "requested", "resolved"),
    [
        ("compressed-tensors", "auto", "fp8"),
        ("compressed-tensors", "bfloat16", "bfloat16"),
        ("modelopt", "auto", "auto"),  # vLLM has resolved these before
    ],
)
def test_the_scheme_of_the_cache_is_resolved_before_dims_are_padded(
    method: str, requested: str, resolved: str
) -> None:
    section = {"quant_method": method, "kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    hf_config = SimpleNamespace(quantization_config=section)
    stub: Any = SimpleNamespace(
        model_config=SimpleNamespace(hf_config=hf_config),
        cache_config=SimpleNamespace(cache_dtype=requested),
    )
    resolve_cache_dtype(stub)
    assert stub.cache_config.cache_dtype == resolved


@pytest.mark.parametrize(
    ("name", "config", "cache", "expected"),
    [
        (None, None, "auto", NOT_QUANTIZED),
        ("fp8", None, "auto", QuantizationMultiples(16)),
        ("fp8_per_tensor", None, "auto", QuantizationMultiples(16)),
        ("fp8_per_channel", None, "auto", QuantizationMultiples(16)),
        ("fp8_per_block", None, "auto", QuantizationMultiples(128)),
        ("mxfp8", None, "auto", QuantizationMultiples(32)),
        # Quantizes experts only; and packed by a quantizer, so not padded.
        ("int8_per_channel_weight_only", None, "auto", NOT_QUANTIZED),
        ("compressed-tensors", None, "auto", NOT_QUANTIZED),
        ("online", {"linear": "fp8_per_block"}, "auto", QuantizationMultiples(128)),
        (
            "online",
            {"targets": {"re:.*mlp.*": "fp8_per_tensor", "re:.*attn.*": "mxfp8"}},
            "auto",
            QuantizationMultiples(32),
        ),
        (None, None, "fp8_e4m3", QuantizationMultiples(cache=16)),
        (None, None, "bfloat16", NOT_QUANTIZED),
    ],
)
def test_each_quantization_has_its_multiple(
    name: str | None, config: dict[str, Any] | None, cache: str, expected: QuantizationMultiples
) -> None:
    quantization_config = resolve_quantization_config(name, config)
    stub: Any = SimpleNamespace(
        model_config=SimpleNamespace(
            quantization=name, quantization_config=quantization_config, hf_config=None
        ),
        cache_config=SimpleNamespace(cache_dtype=cache),
    )
    assert requested_quantization(stub) == expected


def test_dims_are_padded_to_the_multiples_of_quantization(model: Path) -> None:
    stored, fp8 = open_checkpoint(model).layout, QuantizationMultiples(linear=16, cache=16)
    requested = {"quantization": "fp8_per_tensor", "cache_dtype": "fp8"}
    served = configured(model, **requested).served
    assert served == padded_layout(stored, "minimal", quantized=fp8)
    assert all(dim % 16 == 0 for _, _, dim in served.dims())
    assert configured(model, {"align": "none"}, **requested).served == stored


MISALIGNED = layout_with(
    [
        layer(("rotary", 4, 58), (2, 35), 250, {"mlp.up_proj": 37, "self_attn.q_proj": 90}),
        layer(("latent", 2, 41), (2, 90), 320),
        layer(("rotary", 4, 72), (4, 72), 400),
    ]
)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("multiple", [16, 32, 128])
@pytest.mark.parametrize("strategy", ["minimal", "measured"])
def test_both_dims_of_each_ranks_linears_are_multiples(
    strategy: Any, multiple: int, tp: int
) -> None:
    quantized = QuantizationMultiples(linear=multiple)
    padded = padded_layout(MISALIGNED, strategy, "h200", tp, quantized)
    for after, before in zip(padded.layers, MISALIGNED.layers, strict=True):
        heads = (
            after.query_heads * padded.query_size(after),
            after.key.heads * after.key.size,
            after.value.heads * after.value.size,
            after.query_heads * after.value.size,
        )
        sides = [dim // tp for dim in (*heads, after.intermediate_size)] + [*after.ranks.values()]
        assert all(side % multiple == 0 for side in sides), sides
        assert after.kv_elements >= before.kv_elements
    assert padded_layout(padded, strategy, "h200", tp, quantized) == padded


@pytest.mark.parametrize(
    ("quantized", "size"),
    [
        (NOT_QUANTIZED, 72),
        (QuantizationMultiples(16), 72),
        (QuantizationMultiples(128), 96),
        (QuantizationMultiples(1, 16), 80),
    ],
)
def test_heads_are_padded_together_for_linears_but_singly_for_the_cache(
    quantized: QuantizationMultiples, size: int
) -> None:
    """Four heads of 72 make 288 = 18 x 16: enough for an FP8 linear, not for an FP8 cache."""
    assert padded_layout(MISALIGNED, "minimal", quantized=quantized).layers[2].key.size == size

"""Misaligned dims are padded at load time, which does not change what the model computes."""

import json
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config.load import LoadConfig

from tests.serving import aligned_engines
from tests.serving.models import layer, write_model
from vllm_gac.alignment.padded_layout import padded_layout
from vllm_gac.alignment.rules import QuantizationMultiples
from vllm_gac.checkpoint.open import open_checkpoint
from vllm_gac.errors import CheckpointError
from vllm_gac.layout.dims import ModelLayout
from vllm_gac.serving.config.padding import align_config
from vllm_gac.serving.gac_config import GacConfig
from vllm_gac.serving.loading.loader import GacModelLoader

HEAD_DIM = 60
FP8 = QuantizationMultiples(linear=16, cache=16)
# Dense keys, latents of one head, selected pairs, latents of two heads. All run on the reference
# attention, however they are padded. No sum has more than 512 terms: see test_padding_keeps....
LAYERS = [
    layer(("rotary", 4, 60), (2, 43), 397, {"mlp.down_proj": 61, "self_attn.q_proj": 93}),
    layer(("latent", 4, 27), (2, 30), 301, {"mlp.gate_proj": 50, "self_attn.k_proj": 37}),
    layer(("rotary", 4, 38), (4, 30), 250),
    layer(("latent", 2, 41), (2, 54), 485),
]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    gac = {"version": 1, "softmax_scale": HEAD_DIM**-0.5, "head_dim": HEAD_DIM, "layers": LAYERS}
    write_model(tmp_path / "model", LAYERS, gac=gac)
    return tmp_path / "model"


@pytest.mark.slow
def test_padding_keeps_the_served_logits_bit_for_bit(model: Path, tmp_path: Path) -> None:
    """In fp32 and greedily, from prompts that are prefilled in chunks.

    Zeros between the terms of a sum do not change it if the terms are added in order. oneDNN, which
    multiplies for vLLM's linears, adds up to 512 terms in order (AVX-512; more on AVX2). Zeros lie
    between other terms only in o_proj. Apart from sums, only `silu` depends on padding; see
    tests/serving/aligned_engines.py.
    """
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        pytest.skip("oneDNN's order of summation is known for x86 from AVX2 on")
    served = aligned_engines.run(model, tmp_path, ["none", "minimal", "measured"])
    expected = served["none"]
    assert expected["logits"].std() > 0.1
    for strategy, answer in served.items():
        assert answer["tokens"] == expected["tokens"], strategy
        assert torch.equal(answer["logits"], expected["logits"]), strategy
        padded = padded_layout(open_checkpoint(model).layout, strategy)
        assert answer["head_size"] == padded.cache_head_dim
        assert answer["kv_cache_tokens"] == pytest.approx(
            2**30 / (4 * padded.kv_elements), rel=1e-3
        )


class ConfigStub(SimpleNamespace):
    """The fields of vLLM's config that `align_config` and the loader read."""

    def __init__(
        self,
        directory: Path,
        options: dict[str, Any],
        *,
        tp: int = 1,
        quantization: str | None = None,
        cache_dtype: str = "auto",
        trainer: object = None,
    ) -> None:
        hf_config = GacConfig.from_pretrained(directory)
        super().__init__(
            model_config=SimpleNamespace(
                model=str(directory),
                revision=None,
                hf_config=hf_config,
                get_model_arch_config=lambda: hf_config.head_dim,
                quantization=quantization,
                quantization_config=None,
                dtype=torch.bfloat16,
            ),
            load_config=LoadConfig(load_format="gac", model_loader_extra_config=options),
            parallel_config=SimpleNamespace(tensor_parallel_size=tp, pipeline_parallel_size=1),
            cache_config=SimpleNamespace(
                cache_dtype=cache_dtype, kv_cache_dtype_skip_layers=[], sliding_window=None
            ),
            weight_transfer_config=trainer,
            lora_config=None,
        )

    @property
    def served(self) -> ModelLayout:
        layout: ModelLayout = self.model_config.hf_config.served
        return layout

    @property
    def stored(self) -> ModelLayout:
        layout: ModelLayout = self.model_config.hf_config.stored
        return layout


def aligned(directory: Path, asked: dict[str, Any] | None = None, **options: Any) -> Any:
    """The padded config of a server with these loader options and other `asked` options."""
    config = ConfigStub(directory, options, **asked or {})
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
def test_the_layout_to_serve_is_written_beside_the_stored_one(
    model: Path, options: dict[str, Any], strategy: Any
) -> None:
    on_disk = open_checkpoint(model).layout
    config = aligned(model, **options)
    assert config.stored == on_disk
    assert config.served == padded_layout(on_disk, strategy)
    assert config.model_config.hf_config.head_dim == config.served.cache_head_dim
    if strategy != "none":
        assert config.model_config.model_arch_config == config.served.cache_head_dim
    align_config(config)
    assert config.stored == on_disk
    assert config.served == padded_layout(on_disk, strategy)


def test_weights_from_a_trainer_are_refused_where_dims_are_padded(model: Path) -> None:
    trained = {"trainer": SimpleNamespace(backend="nccl")}
    with pytest.raises(CheckpointError, match=r"^--weight-transfer-config"):
        aligned(model, trained)
    config = aligned(model, trained, align="none")
    assert config.served == config.stored


def test_the_config_travels_with_both_layouts(model: Path) -> None:
    config = aligned(model, align="measured")
    sent = pickle.loads(pickle.dumps(config.model_config.hf_config))
    assert sent.served == config.served
    assert sent.stored == config.stored


def test_each_tensor_parallel_part_of_a_width_is_aligned(model: Path) -> None:
    widths = [layer.intermediate_size for layer in aligned(model, {"tp": 2}).served.layers]
    assert widths == [400, 304, 256, 496]


def test_dims_are_padded_to_the_multiples_of_quantization(model: Path) -> None:
    asked = {"quantization": "fp8_per_tensor", "cache_dtype": "fp8"}
    served = aligned(model, asked).served
    assert served == padded_layout(open_checkpoint(model).layout, "minimal", quantized=FP8)
    assert all(dim % 16 == 0 for _, _, dim in served.dims())
    assert aligned(model, asked, align="none").served == open_checkpoint(model).layout


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


@pytest.mark.parametrize("strategy", ["none", "minimal", "measured"])
def test_the_loader_streams_the_tensors_of_the_padded_layout(model: Path, strategy: str) -> None:
    config = aligned(model, align=strategy)
    for _ in range(2):  # reloading makes a new loader, which has only the config
        loader = GacModelLoader(config.load_config)
        stream = loader.get_all_weights(config.model_config, torch.nn.Module())
        shapes = {name: tuple(tensor.shape) for name, tensor in stream}
        expected = config.served.tensors()
        # This layer has the model's own frequencies: one row for all heads.
        table = "model.layers.0.self_attn.rope_inv_freq"
        if table in expected:
            expected[table] = (1, *expected[table][1:])
        assert shapes == expected

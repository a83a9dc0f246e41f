"""A model with experts beside compressed attention is served; what was not tried is refused."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.serving.engines import assert_same, served_by_ranks
from tests.support.dense_models import config, write, write_text
from vllm_gac.alignment.rules import padded_layout
from vllm_gac.checkpoint.open import open_checkpoint
from vllm_gac.errors import CheckpointError
from vllm_gac.layout.dims import layout_of
from vllm_gac.layout.tensor_parallel import repeated_heads
from vllm_gac.planning.request import PlanRequest
from vllm_gac.serving.config.engine_options import check_experts
from vllm_gac.serving.loading.quantized_checkpoint import check_packed
from vllm_gac.steps.compress.compress import compress
from vllm_gac.steps.compress.request import CompressRequest

RAW = config(
    model_type="qwen3_moe",
    architectures=["Qwen3MoeForCausalLM"],
    head_dim=64,
    hidden_size=128,
    vocab_size=4096,
    max_position_embeddings=512,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("experts")
    dense, text = write(directory / "dense", RAW), write_text(directory / "text.txt")
    compress(
        dense,
        directory / "out",
        PlanRequest(kv_ratio=0.6, methods=("heads",)),
        CompressRequest(max_tokens=1024, sequence_length=128),
        calibration=[text],
        progress=False,
    )
    return directory / "out"


@pytest.mark.slow
def test_tensor_parallel_ranks_and_stages_answer_as_one_process(model: Path) -> None:
    alone, _ = served_by_ranks(model)
    two, room = served_by_ranks(model, tensor_parallel_size=2)
    stages, _ = served_by_ranks(model, pipeline_parallel_size=2)
    assert_same(two, alone)
    assert_same(stages, alone)
    layout = repeated_heads(padded_layout(open_checkpoint(model).layout, "minimal", tp=2), 2)
    assert room == pytest.approx(2 * (1 << 30) / (4 * layout.kv_elements), rel=0.01)


def requested(
    lora: object = None, parallel: dict[str, Any] | None = None, **model: Any
) -> SimpleNamespace:
    """The fields of VllmConfig that the check reads, with these values in place of defaults."""
    flags = dict.fromkeys(("enable_expert_parallel", "enable_eplb", "enable_dbo"), False)
    dense = {"hf_config": SimpleNamespace(), "quantization": None, "quantization_config": None}
    return SimpleNamespace(
        lora_config=lora,
        parallel_config=SimpleNamespace(**flags | {"data_parallel_size": 1} | (parallel or {})),
        model_config=SimpleNamespace(**dense | model),
    )


@pytest.mark.parametrize(
    ("changes", "option"),
    [
        ({"quantization": "fp8_per_tensor"}, "--quantization"),
        ({"hf_config": SimpleNamespace(quantization_config={})}, "config.json: quantization_conf"),
        ({"lora": "some"}, "--enable-lora"),
        ({"parallel": {"enable_expert_parallel": True}}, "--enable-expert-parallel"),
        ({"parallel": {"enable_eplb": True}}, "--enable-eplb"),
        ({"parallel": {"enable_dbo": True}}, "--enable-dbo"),
        ({"parallel": {"data_parallel_size": 2}}, "--data-parallel-size"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_options_that_were_not_tried_with_experts_are_refused(
    changes: dict[str, Any], option: str
) -> None:
    with pytest.raises(CheckpointError, match=f"{option}.*experts"):
        check_experts(requested(**changes), layout_of(RAW))
    check_experts(requested(), layout_of(RAW))
    check_experts(requested(**changes), layout_of(config()))  # which has no experts


def test_a_packed_dense_model_with_experts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="experts"):
        check_packed(tmp_path, layout_of(RAW), {"quant_method": "fp8"})

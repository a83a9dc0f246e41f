"""Low-rank linears of one input: their down factors are fused into one GEMM."""

from pathlib import Path
from typing import Any

import pytest

from tests.serving.engines import OPTIONS, each_in_engine_process
from tests.serving.models import layer, write_model

pytestmark = pytest.mark.slow

EVERY_INPUT = {
    "self_attn.q_proj": 96,
    "self_attn.k_proj": 64,
    "self_attn.v_proj": 72,
    "mlp.gate_proj": 104,
    "mlp.up_proj": 88,
}
PLAIN = ("rotary", 4, 64), (4, 64)
LAYERS = [
    layer(*PLAIN, 512, EVERY_INPUT | {"mlp.down_proj": 96, "self_attn.o_proj": 120}),
    layer(("rotary", 4, 48), (4, 32), 400, {"self_attn.q_proj": 96, "self_attn.v_proj": 40}),
    layer(*PLAIN, 512, {"self_attn.k_proj": 61, "self_attn.v_proj": 37, "mlp.up_proj": 99}),
]


def test_down_factors_are_fused_if_each_begins_on_16_bytes_and_has_no_adapter(
    tmp_path: Path,
) -> None:
    write_model(tmp_path / "model", LAYERS)
    write_model(tmp_path / "misaligned", [LAYERS[0], LAYERS[2]])
    misaligned = str(tmp_path / "misaligned")
    padded, as_they_are, adapted = each_in_engine_process(
        fused_factors,
        [
            (str(tmp_path / "model"), "minimal", False),
            (misaligned, "none", False),
            (misaligned, "minimal", True),
        ],
    )
    assert padded == [[[96, 64, 72], [104, 88]], [[96, 40], []], [[64, 40], []]]
    assert as_they_are == [[[96, 64, 72], [104, 88]], [[], []]]
    assert adapted == [[[], []], [[], []]]


def fused_factors(directory: str, align: str, lora: bool) -> list[list[list[int]]]:
    """By layer, for attention and MLP: the ranks of the down factors that share a GEMM."""
    from vllm import LLM

    llm = LLM(directory, model_loader_extra_config={"align": align}, enable_lora=lora, **OPTIONS)
    shapes: list[list[list[int]]] = llm.collective_rpc(_fused_factors)[0]
    return shapes


def _fused_factors(worker: Any) -> list[list[list[int]]]:
    """Runs in the worker."""
    return [
        [
            list(getattr(getattr(module, "down_factors", None), "output_sizes", ()))
            for module in (layer.self_attn, layer.mlp)
        ]
        for layer in worker.get_model().model.layers
    ]

"""Predicted steps of whole models: which steps a run holds, and what is said of their errors."""

from typing import Any

import pytest

from benchmarks.engines.whole_model.models import SHAPES, Batch, model
from benchmarks.engines.whole_model.predicted import (
    Step,
    predict,
    result_of,
    step_microseconds,
)
from vllm_gac.gpu.latency.gemm import gemm_microseconds
from vllm_gac.gpu.latency.layer import BatchMix, Deployment, layer_microseconds
from vllm_gac.gpu.profile_files import read_profile

LLAMA = SHAPES["llama3-8b"]
ALONE, PREFILL = Batch(1, 128, 256, runs=2), Batch(16, 2048, 1)
PROFILE = read_profile("h200")


def test_steps_are_read_from_rows() -> None:
    def row(cell: str, batch: str) -> dict[str, Any]:
        times = {"seconds": [0.8, 9.0, 0.7], "decode_seconds": [0.51]}
        return {"cell": cell, "batch": batch, **times}

    rows = [
        row("dense bf16+bf16", "1x128->256"),
        row("dense fp8+fp8", "1x128->256"),
        row("latent-64 bf16+bf16", "16x2048->1"),
        row("dense fp8+int4_per_token_head", "1x128->256"),
        {"cell": "dense bf16+bf16", "startup_seconds": 50},
    ]
    plain, fp8, latent = predict(rows, LLAMA, PROFILE)
    assert (plain.microseconds, latent.microseconds) == pytest.approx((2000, 50_000))
    assert 0.5 < fp8.predicted / plain.predicted < 0.9


def test_a_step_is_its_layers_with_the_head() -> None:
    dense, ours = (model(name, LLAMA.dense).layout for name in ("dense", "heads-96-64"))
    time = step_microseconds(dense, ours, ALONE, PROFILE)
    mix = BatchMix(1, 128 + 128, prefill_weight=0)
    there = Deployment(PROFILE, mix)
    layers = sum(layer_microseconds(dense, layer, there) for layer in ours.layers)
    head = gemm_microseconds(1, dense.vocab_size, dense.hidden_size, PROFILE)
    assert time == pytest.approx(layers + head, rel=1e-3)
    assert step_microseconds(dense, ours, PREFILL, PROFILE) > time


def test_a_result_has_the_errors_by_batch_and_the_worst_step() -> None:
    steps = [Step("a", ALONE, 100, 90), Step("b", ALONE, 100, 130), Step("a", PREFILL, 100, 100)]
    about = {"command": "x", "commit": "c", "date": "d", "gpu": "g", "versions": {}}
    written = result_of(steps, about)
    assert written.rows[0] == ("all", 3, "10.0%", "+30.0%")
    assert written.rows[2] == ("16x2048->1", 1, "0.0%", "+0.0%")
    assert "b at 1x128->256" in written.notes[-1]

"""Predicted steps of whole models: which steps a run holds, and what is said of their errors."""

import json
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.engines.whole_model.models import BATCHES, Batch, model
from benchmarks.engines.whole_model.predicted import Step, predict, result_of, step_microseconds
from benchmarks.results.__main__ import FOLDER
from vllm_gac.gpu.latency.gemm import gemm_microseconds
from vllm_gac.gpu.latency.layer import DENSE as AS_DENSE
from vllm_gac.gpu.latency.layer import (
    DENSE_WITH_GAC,
    BatchMix,
    Deployment,
    ServedBy,
    layer_microseconds,
)
from vllm_gac.gpu.profile import Types
from vllm_gac.gpu.profile_files import read_profile

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
    plain, fp8, latent = predict(rows, PROFILE)
    assert (plain.microseconds, latent.microseconds) == pytest.approx((2000, 50_000))
    assert 0.5 < fp8.predicted / plain.predicted < 0.9


def test_a_step_is_its_layers_with_the_head() -> None:
    dense, ours = (model(name).layout for name in ("dense", "heads-96-64"))
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


def test_the_dense_model_on_our_attention_gains_what_was_measured() -> None:
    """Whole batches, prefill included, of the committed page; never more than that."""
    page = json.loads((FOLDER / "models_fp8_h200.json").read_text())
    measured = {row[0]: row[2:] for row in page["rows"]}
    layout, types = model("dense").layout, Types("fp8", "fp8")

    def seconds(batch: Batch, served: ServedBy) -> float:
        steps = [(replace(batch, output=1), batch.prompts), (batch, batch.output - 1)]
        return sum(
            count * step_microseconds(layout, layout, of, PROFILE, types, served)
            for of, count in steps
            if count
        )

    for name, *times in zip(
        page["columns"][2:], measured["dense fp8+fp8"], measured["dense-own-attention fp8+fp8"],
        strict=True,
    ):  # fmt: skip
        batch = next(batch for batch in BATCHES if name.startswith(batch.name))
        predicted = seconds(batch, AS_DENSE) / seconds(batch, DENSE_WITH_GAC)
        assert -0.05 < predicted - times[0] / times[1] < 0.001, name

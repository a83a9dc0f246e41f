"""Predicted steps of whole models: which steps results hold, and what they are compared with."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engines.whole_model.models import SHAPES, Batch, models
from benchmarks.engines.whole_model.predicted import (
    Step,
    page,
    predict,
    step_microseconds,
    steps_of,
)
from vllm_gac.gpu.latency.gemm import gemm_microseconds
from vllm_gac.gpu.latency.layer import DENSE as AS_DENSE
from vllm_gac.gpu.latency.layer import BatchMix, layer_microseconds
from vllm_gac.gpu.profile import Types
from vllm_gac.gpu.profile_files import read_profile

ALONE, PREFILL = Batch(1, 128, 256, runs=2), Batch(16, 2048, 1)
FP8 = Types("fp8", "fp8")
PROFILE = read_profile("h200")


def test_steps_are_read_from_both_kinds_of_results(tmp_path: Path) -> None:
    phases = {name: {"seconds": 1.0} for name in ("decode at 64", "decode at 128")}
    phases |= {"prefill": {"seconds": 0.8}, "decode at 1": {"seconds": 0.51}}
    whole = {"shape": "llama3-8b", "models": [{"name": "dense", "phases": phases}]}
    (tmp_path / "whole.json").write_text(json.dumps(whole))

    def row(cell: str, batch: str) -> dict[str, Any]:
        return {"cell": cell, "batch": batch, "seconds": [0.8, 9.0, 0.7], "decode_seconds": [0.51]}

    rows = [
        row("dense bf16+bf16", "1x128->256"),
        row("dense fp8+bf16", "1x128->256"),
        row("latent-64 bf16+bf16", "16x2048->1"),
        {"cell": "dense bf16+bf16", "startup_seconds": 50},
    ]
    (tmp_path / "grid.json").write_text(json.dumps({"shape": "llama3-8b", "rows": rows}))
    of_whole = {(s.model, s.batch.name): s.microseconds for s in steps_of(tmp_path / "whole.json")}
    assert len(of_whole) == 4
    assert of_whole["dense", "1x128->256"] == pytest.approx(2000)
    assert of_whole["dense", "16x2048->1"] == pytest.approx(50_000)
    of_grid = [
        (s.model, s.types, s.batch.name, s.microseconds) for s in steps_of(tmp_path / "grid.json")
    ]
    assert of_grid == [
        ("dense", Types(), "1x128->256", pytest.approx(2000)),
        ("dense", Types("fp8", "bf16"), "1x128->256", pytest.approx(2000)),
        ("latent-64", Types(), "16x2048->1", pytest.approx(50_000)),
    ]


def test_a_step_is_its_layers_with_the_head() -> None:
    every = {model.name: model.layout for model in models(SHAPES["llama3-8b"].dense)}
    dense, ours = every["dense"], every["heterogeneous"]
    time = step_microseconds(dense, ours, ALONE, PROFILE)
    mix = BatchMix(1, 128 + 128, prefill_weight=0)
    layers = sum(layer_microseconds(dense, layer, mix, PROFILE) for layer in ours.layers)
    head = gemm_microseconds(1, dense.vocab_size, dense.hidden_size, PROFILE)
    assert time == pytest.approx(layers + head, rel=1e-3)
    assert step_microseconds(dense, ours, PREFILL, PROFILE) > time


def test_speedups_are_over_the_dense_model_of_the_same_page() -> None:
    dense = models(SHAPES["llama3-8b"].dense)[0].layout
    exact = step_microseconds(dense, dense, ALONE, PROFILE, served=AS_DENSE)
    rows = predict(
        [
            Step("a", "dense", ALONE, exact),
            Step("b", "dense", ALONE, 2 * exact),
            Step("b", "heads-96-64", ALONE, exact),
            Step("c", "heads-96-64", ALONE, exact),
            Step("b", "heads-96-64", ALONE, exact, FP8),  # there is no dense model in FP8
        ],
        PROFILE,
    )
    assert [row["error"] for row in rows[:2]] == pytest.approx([0, -0.5], abs=1e-3)
    assert rows[2]["speedup"] == pytest.approx(2, rel=1e-3)
    assert rows[2]["predicted_speedup"] == pytest.approx(exact / rows[2]["predicted"], rel=1e-3)
    assert "speedup" not in rows[3]
    assert "speedup" not in rows[4]
    assert 0.5 < rows[4]["predicted"] / rows[2]["predicted"] < 0.9
    about = {"date": "d", "commit": "c", "command": "x"}
    profile: dict[str, Any] = {"gpu": "H200", "measured": "m", "sources": {"low_rank": "a page"}}
    text = page(
        about | {"profile": profile | {"sustained": False, "estimated": "none was"}, "rows": rows}
    )
    assert "The profile's times of `low_rank` are from a page." in text
    assert "no `sustained` times" in text
    assert "16-bit steps: median at most 5%" in text
    assert "worst at most 10% (missed: 50.0%)" in text
    assert "FP8 steps: median at most 5% (missed: " in text
    assert "FP8: none was." in text
    assert "| - of these b | 3 | " in text
    assert (
        f"| b | dense | bf16+bf16 | 1x128->256 | {2 * exact:,.0f} | {exact:,.0f} | -50.0% | - | - |"
        in text
    )

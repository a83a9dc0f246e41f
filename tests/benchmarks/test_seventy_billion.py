"""What models of 70B need is what the shapes say."""

import json
from pathlib import Path

import pytest

from benchmarks.common.llama3_8b import without_weights
from benchmarks.planning import seventy_billion
from benchmarks.planning.seventy_billion import SHAPES, calibrated, served, weight_bytes
from vllm_gac.layout.dims import layout_of
from vllm_gac.layout.schema import METHODS


def test_weights_are_those_of_the_shape() -> None:
    layout = layout_of(SHAPES["Llama-3-70B"])
    assert layout.parameters == 70_553_706_496
    ends = 2 * 128256 * 8192
    assert weight_bytes(layout, "bf16") == 2 * layout.parameters
    assert weight_bytes(layout, "FP8") == layout.parameters + ends
    assert layout_of(SHAPES["Qwen2.5-72B"]).parameters == 72_706_203_648


def test_disk_of_statistics_grows_with_low_rank() -> None:
    layout = layout_of(SHAPES["Llama-3-70B"])
    every, two, fewer = (
        calibrated(layout, methods, tokens)
        for methods, tokens in ((METHODS, 2048), (METHODS[:2], 2048), (METHODS[:2], 512))
    )
    assert float(fewer["GPU memory, GB"]) < float(two["GPU memory, GB"])
    assert float(every["disk, GB"]) > float(two["disk, GB"]) > 80 * 4 * 28672**2 / 2 / 1e9
    assert two["tokens"] == "458,752"


def test_what_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seventy_billion, "BUDGETS", ((1.0, 1.0),))
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["Llama-3-70B"]))
    bf16, fp8 = served(without_weights(tmp_path, SHAPES["Llama-3-70B"]))
    assert bf16["tokens on one GPU"] is None
    assert fp8["cache, bytes per token"] == "163,840"
    room = int(seventy_billion.GPU_BYTES * 0.92) - (4 << 30) - (70_553_706_496 + 2 * 128256 * 8192)
    assert fp8["tokens on one GPU"] == f"{room // 163_840:,}"

"""The models and the page of the benchmark on two GPUs; needs no GPU."""

import json
from pathlib import Path
from typing import Any

from benchmarks.engines.parallel.models import FP8_RUNS, RUNS, SHAPES, write, write_fp8
from benchmarks.engines.parallel.report import page
from vllm_gac.layout.dims import layout_of
from vllm_gac.layout.tensor_parallel import check_split

ABOUT = {"command": "python", "commit": "0", "date": "2026-11-21", "at_once": 8, "shape": "tiny"}
ENGINE = {"machine": "none", "vllm": "0.32.0", "cudagraphs": "NONE"}


def test_one_width_is_aligned_after_sharding_and_one_before_only(tmp_path: Path) -> None:
    shape = SHAPES["llama3-8b"]
    write(tmp_path, shape)
    widths = {}
    for name in ("dense", "gac", "before"):
        layout = layout_of(json.loads((tmp_path / name / "config.json").read_text()))
        check_split(layout, 2)
        widths[name] = {layer.intermediate_size for layer in layout.layers}
    assert widths == {"dense": {14336}, "gac": {11520}, "before": {11528}}
    assert (11520 // 2) % 64 == 0
    assert 11528 % 8 == 0
    assert (11528 // 2) % 8 != 0


def test_the_page_compares_what_ran_side_by_side(tmp_path: Path) -> None:
    seconds = {run.name: 1.0 for run in RUNS} | {"dense, TP 2": 3.0, "GAC, TP 2": 2.0}
    speed = {
        name: ENGINE
        | {"prefill": [s] * 3, "decode": [s] * 3, "kv_tokens": 100, "startup_seconds": 1.0}
        for name, s in seconds.items()
    }
    layer, *_ = write(tmp_path, SHAPES["tiny"])
    text = page({**ABOUT, "speed": speed, "layer": layer})
    assert "| GAC, TP 2 over dense, TP 2 | 1.500 | 1.500 | 1.000 |" in text
    assert "| dense, TP 2 over dense, TP 1 | 0.333 | 0.333 | 1.000 |" in text


def test_every_model_in_fp8_can_be_served_by_two_gpus(tmp_path: Path) -> None:
    write_fp8(tmp_path, SHAPES["llama3-8b"])
    for run in FP8_RUNS:
        config = json.loads((tmp_path / run.model / "config.json").read_text())
        check_split(layout_of(config), run.tp)
    engine = ENGINE | {"kv_tokens": 100, "startup_seconds": 1.0}
    fp8 = {run.name: engine | {"prefill": [1.0] * 3, "decode": [1.0] * 3} for run in FP8_RUNS}
    fp8["plan, PP 2"]["decode"] = [0.5] * 3
    text = page({**ABOUT, "fp8": fp8})
    assert "| plan, PP 2 over dense, PP 2 | 1.000 | 2.000 | 1.000 |" in text
    assert "| low rank .8, TP 2 over dense, TP 2 | 1.000 | 1.000 | 1.000 |" in text


def test_the_page_counts_tokens_until_completions_part() -> None:
    def seen(tokens: list[int], logprob: float) -> dict[str, Any]:
        top = [[[7, -0.25], [8, -0.75]]] * 3
        return ENGINE | {
            "text_logprobs": [-1.0, logprob],
            "completions": [{"tokens": tokens, "top": top}],
        }

    tokens = {
        "dense, TP 1": seen([7, 7, 7], -1.0),
        "dense, TP 2": seen([7, 7, 7], -1.0),
        "GAC, TP 1": seen([7, 7, 7], -1.0),
        "GAC, TP 2": seen([7, 8, 7], -1.5),
    }
    text = page({**ABOUT, "tokens": tokens})
    assert "| dense | TP 2 | 2 | 2.7183, 2.7183 | 0.0000, 0.000 | 3 of 3 | - |" in text
    assert "| GAC | TP 2 | 2 | 2.7183, 3.4903 | 0.2500, 0.500 | 1 of 3 | 0.500 |" in text

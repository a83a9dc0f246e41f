"""The grid of forms and precisions: what is served, resumed, compared and shown."""

import json
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks.common.engine_process import EngineError
from benchmarks.engines.whole_model.grid import run
from benchmarks.engines.whole_model.grid.cells import (
    FORMS,
    FOUR_BITS,
    LADDER,
    Cell,
    cells,
    chosen,
    models_by_name,
)
from benchmarks.engines.whole_model.grid.compare import compare, goals
from benchmarks.engines.whole_model.ideal import (
    DATA_SHEETS,
    Cost,
    Precision,
    Roofs,
    cost,
    decode_bytes,
    linear_weights,
)
from benchmarks.engines.whole_model.models import SHAPES, Batch, models
from vllm_gac.layout.dims import LINEARS

pytest.importorskip("matplotlib", reason="needs the extra `dev`")

from benchmarks.engines.whole_model.grid.page import page, write_page

ROOFS = Roofs(4e12, 7e14, 14e14)
TINY = SHAPES["tiny"]


def test_the_most_telling_cells_come_first() -> None:
    every = cells("llama3-8b")
    assert [(cell.model, cell.weights, cell.cache) for cell in every[:5]] == [
        (form, "fp8", "fp8") for form in FORMS
    ]
    assert len({cell.name for cell in every}) == len(every)
    combinations = {(c.weights, c.cache) for c in every if c.model == "dense"}
    assert len(combinations) == 6
    of_all = [c for c in every if c.model in FORMS and c.cache not in FOUR_BITS]
    assert len(of_all) == 20
    assert all(set(SHAPES["llama3-8b"].batches) <= set(cell.batches) for cell in of_all)
    ladders = {cell.name for cell in every if set(LADDER) <= set(cell.batches)}
    assert {"dense fp8+fp8", "dense bf16+bf16", "planned-low-rank-90 bf16+bf16"} <= ladders
    assert every[0].options == {"quantization": "fp8_per_tensor", "kv_cache_dtype": "fp8"}
    assert every[5].options == {}


def test_every_cell_has_a_model() -> None:
    by_name = models_by_name(TINY.dense)
    assert {cell.model for cell in cells("tiny")} <= set(by_name)
    assert by_name["dense"]().name == "dense"
    low_rank = by_name["planned-low-rank-80"]()
    dense = by_name["dense"]().layout
    assert low_rank.layout.parameters <= 0.8 * dense.parameters
    assert any(layer.ranks for layer in low_rank.layout.layers)


def test_an_unknown_cell_is_refused() -> None:
    with pytest.raises(SystemExit, match="no cell 'dense bf8'; there are: dense fp8"):
        chosen(cells("tiny"), "dense bf8")
    assert [cell.model for cell in chosen(cells("tiny"), "latent-64 bf16+bf16")] == ["latent-64"]


def test_fp8_halves_the_bytes_of_linears_and_of_the_cache_alone() -> None:
    every = {model.name: model for model in models(SHAPES["llama3-8b"].dense)}
    batch = Batch(3, 100, 2)  # one step, after 101 tokens
    for name in ("dense", "latent-64", "low-rank-80", "heads-96-64"):
        layout = every[name].layout
        linears = sum(
            rows * columns
            for layer in layout.layers
            for linear in LINEARS
            for rows, columns in [layout.linear_shape(layer, linear)]
            if linear not in layer.ranks
        ) + sum(
            rank * sum(layout.linear_shape(layer, linear))
            for layer in layout.layers
            for linear, rank in layer.ranks.items()
        )
        assert linear_weights(layout) == linears
        whole, fp8 = (decode_bytes(layout, batch, Precision(x, x)) for x in (2, 1))
        assert whole - fp8 == linears + 3 * 101 * layout.kv_elements
        costs = cost(layout, batch, Precision(1, 2))
        assert costs.linear_flops == 2 * 300 * linears
        expected = costs.linear_flops / 14e14 + costs.other_flops / 7e14 + costs.read_bytes / 4e12
        assert costs.seconds(ROOFS) == pytest.approx(expected)


def test_without_a_rate_of_fp8_its_gemms_are_as_fast_as_bf16() -> None:
    assert Roofs(1.0, 2.0).gemm(1) == 2.0
    assert DATA_SHEETS["H200"].gemm(1) == 2 * DATA_SHEETS["H200"].gemm(2) - 1e12


def row(cell: Cell, batch: Batch, seconds: float, run_name: str = "r") -> dict[str, Any]:
    layout = models_by_name(SHAPES["llama3-8b"].dense)[cell.model]().layout
    costs = asdict(cost(layout, batch, cell.precision))
    timed = {"seconds": [seconds, 9 * seconds, seconds / 2], "decode_seconds": [0.0]}
    return {"cell": cell.name, "run": run_name, "gpu": "0", "batch": batch.name, "cost": costs} | (
        timed
    )


def start(cell: Cell, seconds: float, is_cold: bool = True) -> dict[str, Any]:
    about = {"startup_seconds": seconds, "is_cold": is_cold, "torch_compile_seconds": 1.0}
    facts = {"kv_tokens": 1000, "what": "it", "parameters": 5, "kv_bytes_per_token": 2}
    software = {"machine": "GPU", "vllm": "1", "torch": "2", "triton": "3"}
    named = {"cell": cell.name, "run": "r", "gpu": "0", "attention": ["GAC"], "linears": []}
    return named | about | facts | software


CELLS = {cell.name: cell for cell in cells("llama3-8b")}
DENSE, GAC = CELLS["dense fp8+fp8"], CELLS["heads-96-64 fp8+fp8"]
BATCH = SHAPES["llama3-8b"].batches[3]


def test_cells_are_compared_with_dense_of_the_same_types_and_of_bf16() -> None:
    rows = [
        start(DENSE, 50),
        row(DENSE, BATCH, 6.0),
        start(GAC, 40, is_cold=False),
        row(GAC, BATCH, 5.0),
        row(CELLS["dense bf16+bf16"], BATCH, 10.0, "another"),
    ]
    dense, gac, bf16 = compare(rows, list(CELLS), ROOFS, "GPU")
    of_gac, of_bf16 = gac.batches[BATCH.name], bf16.batches[BATCH.name]
    assert (of_gac.seconds, of_gac.speedup, of_gac.over_bf16) == (5.0, 1.2, 2.0)
    assert of_gac.ideal is not None
    assert of_gac.realized == pytest.approx(0.2 / (of_gac.ideal - 1))
    assert of_gac.apart
    assert not of_bf16.apart
    assert (dense.cold_start, gac.cold_start) == (50, None)
    assert of_gac.of_roofline == pytest.approx(Cost(**rows[3]["cost"]).seconds(ROOFS) / 5)
    reached = {goal.what: goal for goal in goals([dense, gac, bf16])}
    assert reached["the same over dense in bf16, 128x2048->256"].reached is False
    missing_goal = reached["cold start of eight kinds of layers over that of dense, fp8+fp8"]
    assert missing_goal.reached is None


def test_four_bits_are_compared_with_dense_and_an_fp8_cache() -> None:
    int4 = CELLS["dense fp8+int4_per_token_head"]
    assert int4.options == {
        "quantization": "fp8_per_tensor",
        "kv_cache_dtype": "int4_per_token_head",
    }
    layout = models_by_name(SHAPES["llama3-8b"].dense)["dense"]().layout
    cached = 3 * 101 * layout.kv_elements
    fp8, four = (decode_bytes(layout, Batch(3, 100, 2), c.precision) for c in (DENSE, int4))
    assert fp8 - four == cached - cached * 68 // 128
    rows = [row(DENSE, BATCH, 6.0), row(int4, BATCH, 8.0)]
    dense, found = compare(rows, list(CELLS), ROOFS, "NVIDIA H100 80GB HBM3")
    assert found.batches[BATCH.name].speedup == 0.75
    assert (dense.is_base, found.is_base) == (True, False)
    least = Cost(**rows[1]["cost"]).seconds(DATA_SHEETS["H100"])
    assert found.batches[BATCH.name].of_roofline == pytest.approx(least / 8)


def test_eight_kinds_of_layers_start_no_later_than_the_dense_model() -> None:
    ours = CELLS["heterogeneous fp8+fp8"]
    found = compare([start(DENSE, 50), start(ours, 60)], list(CELLS), ROOFS, "GPU")
    (goal,) = [goal for goal in goals(found) if goal.measured is not None]
    assert (goal.measured, goal.reached) == (1.2, False)


def test_low_rank_answers_for_its_slowest_batch() -> None:
    low_rank = Cell("low-rank-mlp", "bf16", "bf16", LADDER)
    dense = Cell("dense", "bf16", "bf16", LADDER)
    rows = [row(dense, batch, 1.0) for batch in LADDER]
    rows += [row(low_rank, b, 1.25 if b.prompts == 8 else 0.5) for b in LADDER]
    found = compare(rows, list(CELLS), ROOFS, "GPU")
    worst = {goal.what: goal for goal in goals(found)}
    slowest = worst["low-rank-mlp bf16+bf16: least speedup, batches of 1 to 256"]
    assert (slowest.measured, slowest.reached) == (0.8, False)


def test_only_batches_without_a_row_are_served_again() -> None:
    every = cells("tiny")[:2]
    rows = [{"cell": every[0].name, "batch": batch.name} for batch in every[0].batches]
    rows += [{"cell": every[1].name, "batch": every[1].batches[0].name}]
    rows += [{"cell": every[1].name, "error": "died"}]
    (left,) = run.missing(every, rows)
    assert (left.name, left.batches) == (every[1].name, every[1].batches[1:])


class FakeEngine:
    """Answers as an engine does, without a process."""

    running: dict[str, int]
    most: int
    broken: str

    def __init__(self, name: str, log: Path, **environment: str) -> None:
        self.name, self.log, self.gpu = name, log, environment["CUDA_VISIBLE_DEVICES"]

    def start(self, **options: Any) -> None:
        FakeEngine.running[self.gpu] = FakeEngine.running.get(self.gpu, 0) + 1
        FakeEngine.most = max(FakeEngine.most, FakeEngine.running[self.gpu])
        assert json.loads((Path(options["model"]) / "config.json").read_text())
        self.is_up = True

    def wait(self, seconds: float | None = None) -> float:
        if self.name == FakeEngine.broken:
            raise EngineError("died: out of memory")
        return 12.0

    def ask(self, question: Callable[..., Any], *, seconds: float, **arguments: Any) -> Any:
        software = {"machine": "GPU", "vllm": "1", "torch": "2", "triton": "3"}
        return {
            "facts": {"kv_tokens": 10, "attention": ["GAC"], "linears": ["x"], **software},
            "cache_and_compilation": {"torch_compile_seconds": 0.0},
            "batch_seconds": {"seconds": 0.5, "decode_seconds": 0.25},
        }[question.__name__]

    def close(self, patience: float = 0.0) -> None:
        if getattr(self, "is_up", False):
            FakeEngine.running[self.gpu] -= 1
            self.is_up = False


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeEngine.running, FakeEngine.most, FakeEngine.broken = {}, 0, ""
    monkeypatch.setattr(run, "Engine", FakeEngine)


def serve(out: Path, every: list[Cell], deadline: float = 1e9) -> list[dict[str, Any]]:
    by_name = models_by_name(TINY.dense)
    serving = run.Serving(
        out, lambda name: by_name[name](), {}, time.monotonic() + deadline, longest=10
    )
    rows, known = run.open_rows(out, "now")
    run.serve_all(list(run.missing(every, known)), ["0", "1"], serving, rows)
    return run.open_rows(out, "now")[1]


@pytest.mark.usefixtures("fakes")
def test_each_gpu_serves_one_engine_at_a_time_and_a_failure_stops_nothing(tmp_path: Path) -> None:
    every = [cell for cell in cells("tiny") if "planned" not in cell.model][:6]
    FakeEngine.broken = every[1].name
    rows = serve(tmp_path, every)
    assert FakeEngine.most == 1
    assert set(FakeEngine.running.values()) == {0}
    (failed,) = [row for row in rows if "error" in row]
    assert (failed["cell"], failed["error"]) == (every[1].name, "died: out of memory")
    assert list(run.missing(every, rows)) == [every[1]]

    FakeEngine.broken = ""
    rows = serve(tmp_path, every)
    assert not list(run.missing(every, rows))
    assert len([row for row in rows if "startup_seconds" in row]) == 6

    (tmp_path / "run.json").write_text(
        json.dumps({"shape": "tiny", "commit": "c", "date": "2026-01-01", "engine": {}})
    )
    (tmp_path / "roofs.json").write_text(
        json.dumps({"bytes_per_second": 4e12, "flops_per_second": 7e14})
    )
    write_page(tmp_path, tmp_path / "page")
    text = (tmp_path / "page.md").read_text()
    assert "| dense | fp8+fp8 | 10 | 0.500 s; 0.00 |" in text
    assert "not measured" not in text
    ElementTree.parse(tmp_path / "page.svg")


@pytest.mark.usefixtures("fakes")
def test_an_engine_that_ends_with_the_run_has_not_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = threading.Event()

    def ask(*_: Any, **__: Any) -> Any:
        closed.wait(60)
        raise OSError("handle is closed")

    def interrupted(_: threading.Thread) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(FakeEngine, "ask", ask)
    monkeypatch.setattr(FakeEngine, "close", lambda *_: closed.set())
    join = threading.Thread.join
    monkeypatch.setattr(threading.Thread, "join", interrupted)
    with pytest.raises(KeyboardInterrupt):
        serve(tmp_path, cells("tiny")[:1])
    monkeypatch.setattr(threading.Thread, "join", join)
    for thread in threading.enumerate():
        if "_serve_on" in thread.name:
            thread.join()
    assert run.open_rows(tmp_path, "now")[1] == []


@pytest.mark.usefixtures("fakes")
def test_nothing_is_begun_that_cannot_end(tmp_path: Path) -> None:
    assert serve(tmp_path, cells("tiny")[:2], run.MIN_SECONDS / 2) == []


def test_a_page_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="nothing is timed yet"):
        write_page(tmp_path, tmp_path / "page")


def test_the_committed_page_is_that_of_the_committed_rows() -> None:
    folder = Path("benchmarks/results")
    result = json.loads((folder / "grid_fp8_h200.json").read_text())
    assert page(result, "grid_fp8_h200.svg") == (folder / "grid_fp8_h200.md").read_text()

"""Whole models: what is served, resumed and reported. Engines are faked."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.engine_process import EngineError
from benchmarks.common.engine_questions import shares_of
from benchmarks.common.json_lines import lines_of
from benchmarks.engines.whole_model import serve
from benchmarks.engines.whole_model.cells import CELLS, FREE, TWO_GPUS, Cell, chosen
from benchmarks.engines.whole_model.models import (
    BATCHES,
    DECODE,
    ONE_PROMPT,
    PREFILL,
    SEQUENCES,
    Batch,
    model,
)
from benchmarks.engines.whole_model.report import result_of


@pytest.mark.parametrize("name", sorted({cell.model for cell in CELLS + TWO_GPUS}))
def test_every_cell_has_a_model(name: str) -> None:
    dense, layout = model("dense").layout, model(name).layout
    assert layout.parameters <= dense.parameters
    assert layout.kv_elements <= dense.kv_elements


def test_an_unknown_cell_is_refused() -> None:
    with pytest.raises(SystemExit, match="--cells"):
        chosen("dense bf8")
    assert [cell.model for cell in chosen("latent-64 bf16+bf16")] == ["latent-64"]


class FakeEngine:
    """Answers as an engine does, without a process."""

    running = 0
    started: list[dict[str, Any]]
    broken = ""

    def __init__(self, name: str, log: Path) -> None:
        self.name, self.log = name, log

    def start(self, **options: Any) -> None:
        FakeEngine.running += 1
        assert FakeEngine.running == 1
        assert json.loads((Path(options["model"]) / "config.json").read_text())
        FakeEngine.started.append(options)

    def wait(self, seconds: float | None = None) -> float:
        return 12.0

    def ask(self, question: Callable[..., Any], *, seconds: float, **arguments: Any) -> Any:
        if self.name == FakeEngine.broken:
            raise EngineError("died: out of memory")
        software = {"machine": "GPU", "vllm": "1", "torch": "2", "triton": "3"}
        return {
            "facts": {"kv_tokens": 10, **software},
            "batch_seconds": {"seconds": 0.5, "decode_seconds": 0.25},
            "kernel_shares": {"owners": {"GEMM": 0.6, "idle": 0.4}, "most": {}},
        }[question.__name__]

    def close(self) -> None:
        FakeEngine.running -= 1


def rows_of(out: Path, cells: Sequence[Cell], *timed: Batch) -> list[dict[str, Any]]:
    FakeEngine.started = []
    (out / "run.json").write_text('{"commit": "c", "date": "2026-01-01"}')
    serve.serve_all(cells, out, timed or BATCHES)
    return lines_of(out / serve.ROWS)


def test_a_failure_stops_nothing_and_only_what_is_missing_is_served_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "Engine", FakeEngine)
    cells = chosen("dense fp8+fp8,dense-own-attention fp8+fp8,heads-96-64 fp8+fp8")
    monkeypatch.setattr(FakeEngine, "broken", cells[1].name)
    rows = rows_of(tmp_path, cells)
    assert [row["cell"] for row in rows if "error" in row] == [cells[1].name]
    monkeypatch.setattr(FakeEngine, "broken", "")
    rows = rows_of(tmp_path, cells)
    (started,) = FakeEngine.started
    assert (started["attention_backend"], started["kv_cache_dtype"]) == ("GAC", "fp8")
    assert len([row for row in rows if "batch" in row]) == len(cells) * len(BATCHES)
    written = result_of(tmp_path)
    assert [row[0] for row in written.rows] == [cells[0].name, cells[1].name, cells[2].name]
    assert written.rows[0][1:] == (10, *[0.5] * len(BATCHES))
    assert written.ratio(written.rows[2], "16x2048->1, s") == 1.0


def test_what_is_free_is_compared_at_each_number_of_sequences(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "Engine", FakeEngine)
    rows_of(tmp_path, FREE, *SEQUENCES)
    stock, attention, layers = FakeEngine.started
    assert "attention_backend" not in stock
    assert (attention["attention_backend"], attention["load_format"]) == ("GAC", "dummy")
    assert (layers["attention_backend"], layers["load_format"]) == ("GAC", "gac")
    written = result_of(tmp_path)
    assert written.cell(written.rows[2], "512x1024->256, s") == 0.5
    assert written.cell(written.rows[2], "512 decoding, ms a step") == pytest.approx(0.9804)
    assert [row[0] for row in written.rows] == [cell.name for cell in FREE]


def test_two_gpus_are_compared_with_the_dense_model_on_as_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serve, "Engine", FakeEngine)
    failed = TWO_GPUS[3].name
    monkeypatch.setattr(FakeEngine, "broken", failed)
    rows_of(tmp_path, TWO_GPUS, ONE_PROMPT, PREFILL, DECODE)
    written = result_of(tmp_path)
    assert [*written.failed] == [failed]
    plan, no_dense = (written.rows[index] for index in (1, 4))
    assert isinstance(plan, dict)
    assert (plan["prefill"], plan["one prompt"]) == (16 * 2048 / 0.5, 4096 / 0.5)
    assert (plan["decode"], plan["decode, times dense"]) == (128 * 255 / 0.25, 1.0)
    assert plan["prefill, ms by owner"] == "GEMM 300, idle 200"
    assert [written.cell(no_dense, f"decode{times}") for times in ("", ", times dense")] == [
        plan["decode"],
        None,
    ]


def test_kernels_have_owners_by_their_names() -> None:
    kernels = [
        (0.0, 4.0, "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<1>>"),
        (4.0, 5.0, "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 2>"),
        (4.5, 6.0, "_norm_rows"),
        (7.0, 10.0, "void cutlass::device_kernel<flash::FlashAttnFwdSm90<1>>"),
    ]
    owners = {"GEMM": 0.4, "attention": 0.3, "norms and quantization": 0.15}
    shares = shares_of(kernels)
    assert shares["owners"] == owners | {"all-reduce": 0.1, "idle": 0.1}
    assert {name: share for name, share in shares["idle"].items() if share} == {kernels[-1][2]: 0.1}


def test_a_result_of_nothing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"commit": "c", "date": "2026-01-01"}')
    with pytest.raises(SystemExit, match="nothing is timed yet"):
        result_of(tmp_path)

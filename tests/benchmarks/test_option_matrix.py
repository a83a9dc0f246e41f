"""The matrix of options: coverage of pairs, verdicts, the page, and a few of its cells."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmarks.engines.option_matrix import cpu, cuda
from benchmarks.engines.option_matrix.__main__ import definition, is_asked
from benchmarks.engines.option_matrix.cells import ADAPTED_ALLOWED, Cell, Level, cells_of, rows_of
from benchmarks.engines.option_matrix.engine_args import ELSEWHERE, in_cells
from benchmarks.engines.option_matrix.forks import Ended, Job, run
from benchmarks.engines.option_matrix.pairs import all_pairs
from benchmarks.engines.option_matrix.report import page
from benchmarks.engines.option_matrix.verdict import verdict
from tests.support.waiting import PATIENCE

FACTORS = {"a": ["1", "2", "3"], "b": ["x", "y"], "c": ["p", "q"], "d": ["u", "v", "w"]}


def test_every_two_levels_meet_in_few_rows() -> None:
    rows, missing = all_pairs(FACTORS, lambda row: True)
    assert not missing
    assert len(rows) <= 12  # nine at least
    for one, other in itertools.combinations(FACTORS, 2):
        met = {(row[one], row[other]) for row in rows}
        assert met == set(itertools.product(FACTORS[one], FACTORS[other]))


def test_a_pair_that_is_not_allowed_is_in_no_row_and_is_reported() -> None:
    def allowed(row: dict[str, str]) -> bool:
        return (row.get("a"), row.get("b")) != ("1", "x")

    rows, missing = all_pairs(FACTORS, allowed)
    assert missing == [(("a", "1"), ("b", "x"))]
    assert all(map(allowed, rows))


def test_a_pair_that_no_whole_row_can_have_is_reported() -> None:
    """With a = 1, no level of b is allowed."""

    def allowed(row: dict[str, str]) -> bool:
        return row.get("a") != "1" or "b" not in row

    rows, missing = all_pairs(FACTORS, allowed)
    assert all(row["a"] != "1" for row in rows)
    assert (("a", "1"), ("c", "p")) in missing


def test_a_cell_is_named_by_its_unusual_levels() -> None:
    factors = {
        "model": {"latent": Level()},
        "dtype": {"fp32": Level(), "bf16": Level({"dtype": "bfloat16"})},
        "layout": {"default": Level(), "NHD": Level(env={"LAYOUT": "NHD"})},
    }
    row = {"model": "latent", "dtype": "bf16", "layout": "NHD"}
    (cell,) = cells_of([row], factors, {"dtype": "float32", "max_num_seqs": 4})
    assert cell.name == "latent, bf16, NHD"
    assert cell.options == {"dtype": "bfloat16", "max_num_seqs": 4}
    assert cell.env == {"LAYOUT": "NHD"}


@pytest.mark.parametrize("matrix", [cpu, cuda], ids=["cpu", "cuda"])
def test_names_are_unique_and_pairs_missing_for_the_stated_reasons_only(matrix: ModuleType) -> None:
    found, _ = matrix.cells()
    assert len({cell.name for cell in found}) == len(found)
    assert len(found) >= 60
    _, missing = rows_of(matrix.FACTORS, matrix.IMPOSSIBLE)
    stated = [
        set(forbidden.items()) for several in matrix.IMPOSSIBLE.values() for forbidden in several
    ]
    assert all(set(pair) in stated for pair in missing)


def test_every_option_of_vllm_is_in_a_cell_or_has_a_reason_not_to_be() -> None:
    arg_utils = pytest.importorskip("vllm.engine.arg_utils")
    options = set(arg_utils.EngineArgs.__dataclass_fields__)
    tried = in_cells(asdict(cell) for matrix in (cpu, cuda) for cell in matrix.cells()[0])
    elsewhere = list(itertools.chain(*ELSEWHERE.values()))
    assert len(set(elsewhere)) == len(elsewhere)
    assert not set(elsewhere) & tried
    assert set(elsewhere) | tried == options


# ---- verdicts ---------------------------------------------------------------------------------


def a_cell(**changes: Any) -> Cell:
    return Cell(**{"name": "n", "model": "m", "options": {"dtype": "float32"}} | changes)


def ended(answer: Any = None, failure: str | None = None) -> Ended:
    return Ended("n", 1.0, answer, failure)


def refused(said: str, kind: str = "CheckpointError") -> Ended:
    return ended({"refused": said, "kind": kind})


def test_adapters_in_16_bits_are_judged_by_mean_errors() -> None:
    lora = {"enable_lora": True}
    assert a_cell(options={"dtype": "float32"} | lora).mean_error is None
    assert a_cell(options={"dtype": "bfloat16"}).mean_error is None
    by_dtype = {
        dtype: a_cell(options={"dtype": dtype} | lora).mean_error
        for dtype in ("float16", "bfloat16")
    }
    assert by_dtype == ADAPTED_ALLOWED


RIGHT = {"name": "answers", "error": 0.001, "gap": 0.0, "allowed": 0.002}


@pytest.mark.parametrize(
    ("cell", "found", "expected"),
    [
        (a_cell(), ended({"asked": [RIGHT]}), "right"),
        (a_cell(), ended({"asked": [RIGHT, RIGHT | {"error": 0.003}]}), "fault"),
        (a_cell(), ended({"asked": [RIGHT | {"error": float("nan")}]}), "fault"),
        (a_cell(), ended({"asked": [RIGHT | {"gap": 0.1}]}), "fault"),
        (a_cell(), ended(failure="died with exit code -11"), "fault"),
        (a_cell(), Ended("n", 9.0, failure="not done after 9 s", late=True), "not finished"),
        (a_cell(), refused("--dtype: is float8; use another"), "fault"),
        (a_cell(refused="--dtype"), refused("--dtype: is float8; use another"), "refused"),
        (a_cell(refused="--dtype"), refused("no kernel"), "fault"),
        (a_cell(refused="dtype"), refused("dtype", "KeyError"), "fault"),
        (a_cell(refused="."), refused("Engine core initialization failed"), "fault"),
        (a_cell(refused="--dtype"), ended({"asked": [RIGHT]}), "fault"),
    ],
)
def test_verdicts(cell: Cell, found: Ended, expected: str) -> None:
    assert verdict(cell, found)["verdict"] == expected


def test_a_verdict_is_kept_while_the_cell_is_the_same_and_was_no_fault() -> None:
    cell = a_cell()
    known = definition(cell) | {"verdict": "right"}
    assert not is_asked(cell, known, None)
    assert is_asked(cell, known, "^n$")
    assert not is_asked(cell, None, "other")
    assert is_asked(cell, None, None)
    assert is_asked(cell, known | {"verdict": "fault"}, None)
    assert is_asked(cell, known | {"verdict": "not finished"}, None)
    assert is_asked(a_cell(model="another"), known, None)


def test_the_page_shows_faults_first_and_says_what_no_cell_has() -> None:
    common = {"options": {"dtype": "float32"}}
    lines = page(
        {
            "machine": "CPU",
            "date": "today",
            "torch": "2",
            "triton": "3",
            "commit": "abc",
            "command": "command --device cpu",
            "at_once": 1,
            "cells": {
                "one": {"verdict": "right", "says": "answers 1e-5", **common},
                "two": {"verdict": "fault", "says": "a | b", **common},
                "three": {"verdict": "not finished", "says": "not done after 9 s", **common},
            },
            "listed": 5,
            "impossible": {"they exclude each other": [{"a": "1", "b": "x"}]},
            "pairs": {"missing": 1, "factors": {"a": ["1", "2"]}},
        }
    ).splitlines()
    assert lines.index("| two | fault | a / b |") < lines.index("| one | right | answers 1e-5 |")
    late = lines.index("| three | not finished | not done after 9 s |")
    assert lines.index("## Not finished") < late < lines.index("## Factors")
    assert "**Partial: 2 of the list's 5 cells have no result yet.**" in lines
    assert "- 1 with x: they exclude each other" in lines


# ---- processes --------------------------------------------------------------------------------


def answer(number: int) -> int:
    os.write(1, b"said")  # pytest has its own sys.stdout
    return number * int(os.environ["FACTOR"])


def hang() -> None:
    time.sleep(600)


def die() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def test_jobs_answer_or_die_and_none_holds_up_the_others(tmp_path: Path) -> None:
    jobs = [
        Job("die", tmp_path / "die.log", die),
        *(Job(str(n), tmp_path / f"{n}.log", answer, (n,), {"FACTOR": "3"}) for n in range(3)),
    ]
    found = {one.name: one for one in run(jobs, at_once=2, seconds=PATIENCE)}
    assert [found[str(n)].answer for n in range(3)] == [0, 3, 6]
    assert found["die"].failure == "died with exit code -11"
    assert not found["die"].late
    assert (tmp_path / "2.log").read_text() == "said"


def test_a_job_that_hangs_is_ended(tmp_path: Path) -> None:
    (ended,) = run([Job("hang", tmp_path / "log", hang)], at_once=1, seconds=1)
    assert ended.failure == "not done after 1 s"
    assert ended.late


# ---- a handful of cells, for real -------------------------------------------------------------


@pytest.mark.slow
def test_a_handful_of_cells_is_right_or_refused(tmp_path: Path) -> None:
    """The command on a CPU; benchmarks/results has the whole matrix."""
    names = ["every shape", "theta", "KV cache fp8", "embeddings of window", "structured outputs"]
    command = [sys.executable, "-m", "benchmarks.engines.option_matrix", str(tmp_path / "out")]
    only = "^(" + "|".join(names) + ")$"
    subprocess.run([*command, "--work", str(tmp_path / "work"), "--only", only], check=True)
    cells = json.loads((tmp_path / "out" / "option_matrix_cpu.json").read_text())["cells"]
    assert {name: cell["verdict"] for name, cell in cells.items()} == {
        name: "refused" if name == "KV cache fp8" else "right" for name in names
    }

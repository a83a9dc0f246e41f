"""The benchmark of older decode kernels: what needs no GPU."""

import itertools
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.kernels.decode_against import LATENT, ROTARY, cases, import_launch, in_turn, page

PACKAGE = Path(__file__).parents[2] / "vllm_gac"


def test_the_ratio_is_that_of_the_medians() -> None:
    order = []

    def decoder(name: str, *times: float) -> Any:
        turns = itertools.cycle(times)
        return _Decoder(microseconds=lambda: order.append(name) or next(turns))

    times = in_turn(decoder("old", 4, 900, 5), decoder("new", 6, 1, 7), rounds=3)
    assert times == {"old_us": 5, "new_us": 6, "ratio": 1.2}
    assert order == ["old", "new", "new", "old", "old", "new"]


def test_every_geometry_is_measured_and_no_case_twice() -> None:
    found = list(cases())
    assert len(set(found)) == len(found) == 92
    assert {case.heads for case in found} == {*ROTARY, *LATENT}
    assert {(case.window, case.queries) for case in found} == {
        (None, 1), (4096, 1), (None, 4), (None, 2),
    }  # fmt: skip


def test_old_kernels_are_imported_beside_the_present_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(PACKAGE, tmp_path / "vllm_gac", ignore=shutil.ignore_patterns("demo"))
    old = tmp_path / "vllm_gac/kernels/decode/tiling.py"
    old.write_text(old.read_text() + "\nOLD = True\n")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    launch = import_launch(tmp_path)
    try:
        tiling = sys.modules[launch.tiling_of.__module__]
        assert tiling.__name__ == "old_vllm_gac.kernels.decode.tiling"
        assert tiling.OLD
    finally:
        for name in [name for name in sys.modules if name.startswith("old_vllm_gac")]:
            del sys.modules[name]
    assert not hasattr(sys.modules["vllm_gac.kernels.decode.tiling"], "OLD")


def test_the_page_starts_with_the_summary() -> None:
    result = {
        "machine": "NVIDIA H200",
        "date": "2026-11-22",
        "command": "python -m x",
        "old_commit": "abc1234",
        "note": "The clocks were not fixed.",
        "rows": [_row("96/64", 10.0, 9.9, same=True), _row("72/56", 10.0, 10.2, same=False)],
    }
    lines = page(result).splitlines()
    assert lines[2:6] == [
        "2 cases: the median of new / old is 1.0050, all are from 0.9900 to 1.0200.",
        "Outputs differ in 1 cases.",
        "More than 1 % slower: 72/56 at batch 4, context 4096 (10.0 to 10.2 us).",
        "The clocks were not fixed.",
    ]
    assert "The older kernels are those of commit abc1234." in lines[7]
    assert lines[-2:] == [
        "| 96/64 | 4 | 4096 | - | 1 | 10.0 | 9.9 | 0.99 | yes |",
        "| 72/56 | 4 | 4096 | - | 1 | 10.0 | 10.2 | 1.02 | no |",
    ]


class _Decoder(SimpleNamespace):
    __hash__ = object.__hash__


def _row(heads: str, old: float, new: float, *, same: bool) -> dict[str, Any]:
    sizes = {"heads": heads, "batch": 4, "context": 4096, "window": None, "queries": 1}
    return {**sizes, "old_us": old, "new_us": new, "ratio": round(new / old, 4), "same": same}

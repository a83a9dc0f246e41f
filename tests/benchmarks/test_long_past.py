"""The rows of the benchmark of long pasts."""

from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from benchmarks.kernels import long_past


def test_long_pasts_are_timed_for_both_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """With faked kernels: which one is chosen, and how much slower that is."""

    def run(layer: Any, query: Any, *_: Any) -> None:
        # Gathering costs something at first, and is then faster.
        took.append(100 + query.shape[0] / 1000 if layer.kernel == "FA4" else query.shape[0])

    took: list[float] = []
    monkeypatch.setattr(long_past, "PAST", 64)
    monkeypatch.setattr(long_past, "prefill_attention", run)
    monkeypatch.setattr(long_past, "microseconds", lambda call: call() or took[-1])
    rows = list(long_past.rows(torch.device("cpu"), (9, 0)))
    assert len(rows) == len(long_past.SIZES) * len(long_past.NEW)
    assert rows[0] == {
        "sizes": "(96, 64)",
        "new tokens": 16,
        "FA4 gathered": 100.1,
        "FA3 from pages": 128,
        "taken": "FA3",
        "lost": 0.279,
    }
    assert [row["taken"] for row in rows[:6]] == ["FA3"] * 4 + ["FA4"] * 2

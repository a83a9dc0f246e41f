"""The page of healing on two GPUs, with invented results, and the distances that it states."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.quality.healing_together import _distances, page

ABOUT = {"command": "python", "commit": "0", "date": "today", "machine": "GPU", "torch": "2"}


def run(divergences: list[float], seconds: float) -> dict[str, Any]:
    return {
        "before": {"divergence": divergences[0], "loss": 2.0},
        "after": {"divergence": divergences[-1], "loss": 1.5},
        "curve": [(n, divergence, 2.0) for n, divergence in enumerate(divergences)],
        "gpu_gb": 3.0,
        "seconds": seconds,
    }


def test_the_page_compares_two_gpus_with_what_one_has_healed() -> None:
    found = {
        "runs": {"one": run([0.5, 0.3], 2.0), "two": run([0.5, 0.31], 1.25)},
        "weights": {"all": 0.01, "largest": 0.2},
        "resumed_bytes_equal": True,
    }
    text = page({**ABOUT, "minutes": 1.0, "tokens": 10, "models": {"130m": found}})
    assert "| 130m | two | 1.250 | 3.0 | 0.5000 to 0.3100 | 2.0000 to 1.5000 |" in text
    assert "| 130m | 5.00% | 1.0%, 20.0% | 1.60 | same bytes |" in text


def test_distances_are_shares_of_the_way_that_weights_have_moved(tmp_path: Path) -> None:
    start, way = torch.zeros(4), torch.tensor([1.0, 0, 0, 0])
    for name, moved in (("student", 0), ("one", 1), ("two", 1.5)):
        (tmp_path / name).mkdir()
        tensors = {"a": start + moved * way, "b": start + (moved > 0) * 3 * way}
        save_file(tensors, tmp_path / name / "model.safetensors")
    found = _distances(tmp_path)
    assert found["all"] == pytest.approx(0.5 / 10**0.5)
    assert found["largest"] == pytest.approx(0.5)

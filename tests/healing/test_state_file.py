"""The state of a healing is read back exactly, or refused in one sentence."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from vllm_gac.errors import CheckpointError
from vllm_gac.healing.guard import Guard, Score
from vllm_gac.healing.state_file import Progress, State, read_state, write_state

SHAPES = {"a": (3, 2), "b": (4,)}


def tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def state(step: int = 9, **changes: Any) -> State:
    score = Score(0.5, 2.0)
    values = {"best": score, "best_step": 6, "curve": [(3, math.nan, 2.5), (6, 0.5, 2.0)]}
    guard = Guard(Score(1.0, 3.0), 1.5, **(values | changes))
    moments = {"averages": tensors(1), "squares": tensors(2)} if guard.begun < step else {}
    best = tensors(3) if guard.best_step not in (0, step) else None
    return State(Progress(step, guard), tensors(0), moments, best)


@pytest.mark.parametrize("changes", [{}, {"begun": 9}, {"best_step": 9}, {"best_step": 0}])
def test_what_was_written_is_read_back(tmp_path: Path, changes: dict[str, int]) -> None:
    written = state(**changes)
    write_state(tmp_path / "state", "run", written)
    read = read_state(tmp_path / "state", "run", tensors(0))
    assert read is not None
    assert repr(read.progress) == repr(written.progress)
    assert repr(read) == repr(written)  # torch prints all of so small tensors
    assert (read.best is None) == (written.best is None)


def test_no_file_is_no_state(tmp_path: Path) -> None:
    assert read_state(tmp_path / "state", "run", tensors(0)) is None


def broken(path: Path) -> list[tuple[str, str]]:
    """Ways to break the state in `path`: files beside it, and what is said of each."""
    good, metadata = load_file(path), {"format": "1", "run": "run"}
    text = json.dumps({"step": 9, "guard": "none"})
    found = [
        ("torn", path.read_bytes()[:-7], "not the state of a healing"),
        ("pickle", b"\x80\x04]\x94.", "not the state of a healing"),
    ]
    for name, contents, _ in found:
        path.with_name(name).write_bytes(contents)
    whole = {"format": "1", "run": "run", "state": _metadata(path)}
    variants: dict[str, tuple[dict[str, torch.Tensor], dict[str, str], str]] = {
        "other": (good, whole | {"run": "other"}, "the state of another run"),
        "newer": (good, whole | {"format": "2"}, "the state of another run"),
        "stateless": (good, metadata, "not the state of a healing"),
        "wrong": (good, metadata | {"state": text}, "not the state of a healing"),
        "less": ({"weights.a": good["weights.a"]}, whole, "other tensors than"),
        "shape": (good | {"weights.b": torch.ones(5)}, whole, r"weights.b: torch.float32 \[5\]"),
        "dtype": (good | {"best.b": torch.ones(4).half()}, whole, "best.b: torch.float16"),
        "nan": (good | {"squares.b": torch.full((4,), math.nan)}, whole, "NaN or infinity"),
    }
    for name, (values, header, _) in variants.items():
        save_file(values, path.with_name(name), header)
    return [(n, m) for n, _, m in found] + [(n, m) for n, (_, _, m) in variants.items()]


def _metadata(path: Path) -> str:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        return str(file.metadata()["state"])


def test_a_state_that_is_broken_or_of_another_run_is_refused(tmp_path: Path) -> None:
    write_state(tmp_path / "state", "run", state())
    for name, said in broken(tmp_path / "state"):
        with pytest.raises(CheckpointError, match=said) as refused:
            read_state(tmp_path / name, "run", tensors(0))
        assert str(tmp_path / name) in str(refused.value)

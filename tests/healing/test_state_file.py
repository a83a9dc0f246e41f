"""The state of a healing is read back exactly, or refused in one sentence."""

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from vllm_gac.errors import CheckpointError
from vllm_gac.healing.guard import Guard, Score
from vllm_gac.healing.state_file import Progress, find_state, remove_state, write_state

SHAPES = {"a": (3, 2), "b": (4,)}


def tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def progress(step: int = 9, **changes: Any) -> Progress:
    score = Score(0.5, 2.0)
    values = {"best": score, "best_step": 6, "curve": [(3, math.nan, 2.5), (6, 0.5, 2.0)]}
    return Progress(step, Guard(Score(1.0, 3.0), 1.5, **(values | changes)))


KINDS = ("weights", "averages", "squares", "best")


def write(directory: Path, of: Progress) -> None:
    values = {kind: tensors(seed) for seed, kind in enumerate(KINDS)}
    write_state(directory, "run", of, values)


@pytest.mark.parametrize(
    ("changes", "absent"),
    [
        ({}, set()),
        ({"begun": 9}, {"averages", "squares"}),
        ({"best_step": 9}, {"best"}),
        ({"best_step": 0}, {"best"}),
    ],
)
def test_what_was_written_is_read_back(
    tmp_path: Path, changes: dict[str, int], absent: set[str]
) -> None:
    write(tmp_path, progress(**changes))
    found = find_state(tmp_path, "run")
    assert found is not None
    assert repr(found.progress) == repr(progress(**changes))
    for seed, kind in enumerate(KINDS):
        read = found.read(kind, tensors(0))
        assert (read is None) == (kind in absent)
        if read is not None:
            assert all(torch.equal(read[name], tensor) for name, tensor in tensors(seed).items())
    assert len(list(tmp_path.iterdir())) == len(KINDS) - len(absent)


def test_only_the_newest_state_stays(tmp_path: Path) -> None:
    for step in (7, 8, 100):
        write(tmp_path, progress(step))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "healing-100-averages.safetensors",
        "healing-100-squares.safetensors",
        "healing-100-weights.safetensors",
        "healing-6-best.safetensors",
    ]
    remove_state(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_state_that_was_not_finished_does_not_count(tmp_path: Path) -> None:
    write(tmp_path, progress(7))
    (tmp_path / "healing-9-averages.safetensors").write_bytes(b"whatever")
    found = find_state(tmp_path, "run")
    assert found is not None
    assert found.progress.step == 7


def test_no_file_is_no_state(tmp_path: Path) -> None:
    assert find_state(tmp_path, "run") is None


def _read_all(directory: Path) -> None:
    found = find_state(directory, "run")
    assert found is not None
    for kind in KINDS:
        found.read(kind, tensors(0))


def test_a_state_that_is_broken_or_of_another_run_is_refused(tmp_path: Path) -> None:
    write(tmp_path, progress())
    weights, best = (tmp_path / f"healing-{name}.safetensors" for name in ("9-weights", "6-best"))
    good, whole = load_file(weights), _metadata(weights)
    wrong = json.dumps({"step": 9, "guard": "none"})
    earlier = json.dumps(asdict(progress(8)))
    nan = torch.full((4,), math.nan)
    variants: list[tuple[Path, dict[str, torch.Tensor], dict[str, str], str]] = [
        (weights, good, whole | {"run": "other"}, "the state of another run"),
        (best, good, whole | {"run": "other"}, "the state of another run"),
        (weights, good, whole | {"format": "2"}, "the state of another run"),
        (weights, good, {"format": "1", "run": "run"}, "not the state of a healing"),
        (weights, good, whole | {"state": wrong}, "not the state of a healing"),
        (weights, good, whole | {"state": earlier}, "its name says 9 steps, it says 8"),
        (weights, {"a": good["a"]}, whole, "other tensors than"),
        (best, good | {"b": torch.ones(5)}, whole, r"b: torch.float32 \[5\]"),
        (best, good | {"b": torch.ones(4).half()}, whole, "b: torch.float16"),
        (weights, good | {"b": nan}, whole, "b: contains NaN or infinity"),
    ]
    for path, values, metadata, said in variants:
        before = path.read_bytes()
        save_file(values, path, metadata)
        _refused(tmp_path, path, said)
        path.write_bytes(before)
    for contents in (weights.read_bytes()[:-7], b"\x80\x04]\x94."):
        weights.write_bytes(contents)
        _refused(tmp_path, weights, "not the state of a healing")
    write(tmp_path, progress())
    best.unlink()
    _refused(tmp_path, best, "not the state of a healing")


def _refused(directory: Path, path: Path, said: str) -> None:
    with pytest.raises(CheckpointError, match=said) as refused:
        _read_all(directory)
    assert str(path) in str(refused.value)


def _metadata(path: Path) -> dict[str, str]:
    with safe_open(path, framework="pt") as file:
        return dict(file.metadata())

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
from vllm_gac.healing.state_file import Progress, read_state, write_state

SHAPES = {"a": (3, 2), "b": (4,)}
Tensors = dict[tuple[str, str], torch.Tensor]


def progress(step: int = 9, **changes: Any) -> Progress:
    score = Score(0.5, 2.0)
    values = {"best": score, "best_step": 6, "curve": [(3, math.nan, 2.5), (6, 0.5, 2.0)]}
    return Progress(step, Guard(Score(1.0, 3.0), 1.5, **(values | changes)))


def tensors(kinds: list[str]) -> Tensors:
    generator = torch.Generator().manual_seed(0)
    return {
        (kind, name): torch.randn(shape, generator=generator)
        for kind in kinds
        for name, shape in SHAPES.items()
    }


def write(path: Path, state: Progress) -> Tensors:
    given = tensors(state.kinds)
    write_state(path, "run", state, SHAPES, lambda kind, name: given[kind, name])
    return given


def read(path: Path) -> tuple[Progress | None, Tensors]:
    tensors: Tensors = {}

    def take(state: Progress, kind: str, name: str, tensor: torch.Tensor) -> None:
        tensors[kind, name] = tensor

    return read_state(path, "run", 10, SHAPES, take), tensors


@pytest.mark.parametrize(
    ("changes", "kinds"),
    [
        ({}, ["weights", "exp_avg", "exp_avg_sq", "best"]),
        ({"begun": 9}, ["weights", "best"]),
        ({"best_step": 9}, ["weights", "exp_avg", "exp_avg_sq"]),
        ({"best_step": 0}, ["weights", "exp_avg", "exp_avg_sq"]),
    ],
)
def test_a_written_state_is_read_back(
    tmp_path: Path, changes: dict[str, int], kinds: list[str]
) -> None:
    written = progress(**changes)
    given = write(tmp_path / "state", written)
    state, tensors = read(tmp_path / "state")
    assert repr(state) == repr(written)  # a NaN does not equal itself
    assert list(dict.fromkeys(kind for kind, _ in tensors)) == kinds
    assert tensors.keys() == given.keys()
    assert all(torch.equal(tensor, given[key]) for key, tensor in tensors.items())
    assert load_file(tmp_path / "state").keys() == {f"{kind}.{name}" for kind, name in given}


def test_a_process_that_only_gives_its_shares_writes_nothing(tmp_path: Path) -> None:
    given = []
    write_state(None, "run", progress(), SHAPES, lambda *key: given.append(key) or torch.ones(1))
    assert given == list(tensors(progress().kinds))
    assert not list(tmp_path.iterdir())


def broken(path: Path) -> list[str]:
    """Write files beside the state in `path` that are none, or of another run; their names."""
    good, metadata = load_file(path), {"format": "2", "run": "run"}
    state = json.loads(_metadata(path))
    damaged = {"torn": path.read_bytes()[:-7], "pickle": b"\x80\x04]\x94."}
    for name, contents in damaged.items():
        path.with_name(name).write_bytes(contents)
    whole = {"format": "2", "run": "run", "state": _metadata(path)}
    variants: dict[str, tuple[dict[str, torch.Tensor], dict[str, str]]] = {
        "other": (good, whole | {"run": "other"}),
        "newer": (good, whole | {"format": "3"}),
        "stateless": (good, metadata),
        "wrong": (good, metadata | {"state": json.dumps(state | {"guard": "none"})}),
        "later": (good, metadata | {"state": json.dumps(state | {"step": 11})}),
        "less": ({"weights.a": good["weights.a"]}, whole),
        "shape": (good | {"weights.b": torch.ones(5)}, whole),
        "dtype": (good | {"best.b": torch.ones(4).half()}, whole),
        "nan": (good | {"exp_avg_sq.b": torch.full((4,), math.nan)}, whole),
    }
    for name, (values, header) in variants.items():
        save_file(values, path.with_name(name), header)
    return [*damaged, *variants]


def _metadata(path: Path) -> str:
    from safetensors import safe_open

    with safe_open(path, framework="pt") as file:
        return str(file.metadata()["state"])


def test_a_state_that_is_broken_or_of_another_run_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "state", progress())
    for name in broken(tmp_path / "state"):
        with pytest.raises(CheckpointError, match=str(tmp_path / name)):
            read(tmp_path / name)

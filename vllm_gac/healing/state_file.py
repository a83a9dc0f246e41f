"""The state of an unfinished healing: one safetensors file, whose metadata is JSON.

run                  SHA-256 of the description of the run that the state is of
state                the number of steps that are done, and the `Guard`
weights.{name}       the parameters, fp32
averages.{name}      Adam's average of the gradient of each; absent right after the run went back
squares.{name}       Adam's average of its square, likewise
best.{name}          the parameters to go back to; absent if they are those above or the input's

Nothing is drawn at random while training (schedule.py), so no generator has a state.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open

from vllm_gac.checkpoint.atomic_files import write_tensors
from vllm_gac.checkpoint.regular_files import refuse_special
from vllm_gac.errors import CheckpointError
from vllm_gac.healing.guard import Guard

_FORMAT = "1"
_MOMENTS = ("averages", "squares")
Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Progress:
    """What the metadata says: `step` steps are done, and the guard."""

    step: int
    guard: Guard


@dataclass(frozen=True, slots=True)
class State:
    """A healing after some steps. All tensors are in host memory when they are read.

    `moments` are Adam's two averages by "averages" and "squares"; they are empty right after the
    run went back. `best` is None if the best parameters are these or the input's.
    """

    progress: Progress
    parameters: Tensors
    moments: Mapping[str, Tensors]
    best: Tensors | None


def write_state(path: Path, run: str, state: State) -> None:
    """Write the state of the run of this description atomically."""
    tensors = _prefixed("weights", state.parameters)
    for kind, values in state.moments.items():
        tensors |= _prefixed(kind, values)
    if state.best is not None:
        tensors |= _prefixed("best", state.best)
    metadata = {"format": _FORMAT, "run": run, "state": json.dumps(asdict(state.progress))}
    write_tensors(path, tensors, metadata)


def read_state(path: Path, run: str, parameters: Tensors) -> State | None:
    """The state in `path`; None if there is no such file.

    `parameters` say which shapes there are. Raises CheckpointError if it is the state of another
    run than `run`, or broken.
    """
    if not path.exists():
        return None
    refuse_special(path)
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != _FORMAT or metadata.get("run") != run:
                raise CheckpointError(
                    f"{path}: the state of another run; remove it to begin again, or resume with "
                    "what that run was begun with"
                )
            progress = TypeAdapter(Progress).validate_json(metadata.get("state", ""))
            kinds = _kinds(progress)
            expected = {f"{kind}.{name}" for kind in kinds for name in parameters}
            if set(file.keys()) != expected:
                raise _broken(path, "has other tensors than its metadata says")
            read = {kind: dict(_read(file.get_tensor, path, kind, parameters)) for kind in kinds}
    except (SafetensorError, ValidationError, OSError) as e:
        raise _broken(path, str(e).partition("\n")[0]) from e
    moments = {kind: read[kind] for kind in kinds if kind in _MOMENTS}
    return State(progress, read["weights"], moments, read.get("best"))


def _kinds(progress: Progress) -> list[str]:
    """The kinds of tensors that a state has."""
    guard = progress.guard
    moments = _MOMENTS if progress.step > guard.begun else []
    best = ["best"] if guard.best_step not in (0, progress.step) else []
    return ["weights", *moments, *best]


def _prefixed(kind: str, tensors: Tensors) -> dict[str, torch.Tensor]:
    return {f"{kind}.{name}": tensor.detach().contiguous() for name, tensor in tensors.items()}


def _read(
    get: Callable[[str], torch.Tensor], path: Path, kind: str, parameters: Tensors
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in parameters.items():
        tensor = get(f"{kind}.{name}")
        if tensor.shape != parameter.shape or tensor.dtype != torch.float32:
            raise _broken(path, f"{kind}.{name}: {tensor.dtype} {list(tensor.shape)}")
        if not tensor.isfinite().all():
            raise _broken(path, f"{kind}.{name}: contains NaN or infinity")
        yield name, tensor


def _broken(path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"{path}: not the state of a healing ({why}); remove it to begin again")

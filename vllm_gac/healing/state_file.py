"""The state of an unfinished healing: one safetensors file, whose metadata is JSON.

run                  SHA-256 of the description of the run that the state is of
state                the number of steps that are done, and the `Guard`
weights.{name}       the parameters, fp32
exp_avg.{name}       Adam's average of the gradient of each; absent right after the run went back
exp_avg_sq.{name}    Adam's average of its square, likewise
best.{name}          the parameters to go back to; absent if they are those above or the input's

Nothing is drawn at random while training (schedule.py), so no generator has a state.

Where several processes heal together, the first one writes the tensors as if it were alone, one
after the other, and each reads its shares of them. So there is one file, which is complete or
absent, whatever the number of processes; and none of them ever holds all of the state.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open

from vllm_gac.checkpoint.atomic_files import write_floats
from vllm_gac.checkpoint.untrusted_files import open_pinned
from vllm_gac.errors import CheckpointError
from vllm_gac.healing.adam import MOMENTS
from vllm_gac.healing.guard import Guard

_FORMAT = "2"
Shapes = Mapping[str, Sequence[int]]


@dataclass(frozen=True, slots=True)
class Progress:
    """What the metadata says: `step` steps are done, and the guard."""

    step: int
    guard: Guard

    @property
    def kinds(self) -> list[str]:
        """The kinds of tensors that the state has."""
        moments = MOMENTS if self.step > self.guard.begun else ()
        best = ("best",) if self.guard.best_step not in (0, self.step) else ()
        return ["weights", *moments, *best]


def write_state(
    path: Path | None,
    run: str,
    progress: Progress,
    shapes: Shapes,
    give: Callable[[str, str], torch.Tensor],
) -> None:
    """Write the state of the run of this description atomically.

    Args:
        path: The file; None in processes that only give their shares.
        run: The description.
        progress: How far the run is.
        shapes: The shape of each parameter, by its name.
        give: Returns a tensor in host memory by its kind and the parameter's name.
    """
    names = [(kind, name) for kind in progress.kinds for name in shapes]
    tensors = (give(kind, name) for kind, name in names)
    if path is None:
        for _ in tensors:
            pass
        return
    metadata = {"format": _FORMAT, "run": run, "state": json.dumps(asdict(progress))}
    write_floats(path, {f"{kind}.{name}": shapes[name] for kind, name in names}, tensors, metadata)


def read_state(
    path: Path,
    run: str,
    steps: int,
    shapes: Shapes,
    take: Callable[[Progress, str, str, torch.Tensor], None],
) -> Progress | None:
    """Read the state in `path` of a run of so many `steps`; returns None if there is no such file.

    `take` is called with what is known of the progress, and each tensor, by its kind and the
    parameter's name. Raises CheckpointError if it is the state of another run than `run`, or
    broken.
    """
    if not path.exists():
        return None
    try:
        with open_pinned(path) as same, safe_open(same, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != _FORMAT or metadata.get("run") != run:
                raise CheckpointError(
                    f"{path}: the state of another run; remove it to begin again, or resume with "
                    "what that run was begun with"
                )
            progress = TypeAdapter(Progress).validate_json(metadata.get("state", ""), strict=True)
            if not 0 < progress.step <= steps:
                raise _broken(path, f"after step {progress.step}, the run has {steps}")
            expected = {f"{kind}.{name}" for kind in progress.kinds for name in shapes}
            if set(file.keys()) != expected:
                raise _broken(path, "has other tensors than its metadata says")
            for kind in progress.kinds:
                for name, shape in shapes.items():
                    tensor = file.get_tensor(f"{kind}.{name}")
                    _check(path, f"{kind}.{name}", tensor, shape)
                    take(progress, kind, name, tensor)
    except (SafetensorError, ValidationError, OSError) as e:
        raise _broken(path, str(e).partition("\n")[0]) from e
    return progress


def _check(path: Path, name: str, tensor: torch.Tensor, shape: Sequence[int]) -> None:
    if list(tensor.shape) != list(shape) or tensor.dtype != torch.float32:
        raise _broken(path, f"{name}: {tensor.dtype} {list(tensor.shape)}")
    if not tensor.isfinite().all():
        raise _broken(path, f"{name}: contains NaN or infinity")


def _broken(path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"{path}: not the state of a healing ({why}); remove it to begin again")

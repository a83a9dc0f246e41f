"""The state of an unfinished healing: safetensors files, whose metadata is JSON.

healing-{step}-averages.safetensors  Adam's average of the gradient of each parameter
healing-{step}-squares.safetensors   Adam's average of its square
healing-{step}-best.safetensors      the best parameters, of that step
healing-{step}-weights.safetensors   the parameters after that many steps, and in its metadata the
                                     steps that are done and the `Guard`

Each file is whole or absent, and that of the weights comes last, so that the state of a step is
whole if it is there. Files of other steps are removed then. Averages are absent right after the run
went back, and the best parameters if they are the present ones or the input's. With one file for
each kind, no more than one kind is copied to host memory at once.

Nothing is drawn at random while training (schedule.py), so no generator has a state.
"""

import json
import re
from collections.abc import Iterator, Mapping
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
_WEIGHTS = re.compile(r"healing-(\d{1,12})-weights\.safetensors")
MOMENTS = ("averages", "squares")
Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Progress:
    """What the metadata says: `step` steps are done, and the guard."""

    step: int
    guard: Guard

    def kinds(self) -> dict[str, int]:
        """The kinds of files that the state has, and the step in the name of each."""
        guard = self.guard
        moments = MOMENTS if self.step > guard.begun else ()
        best = {"best": guard.best_step} if guard.best_step not in (0, self.step) else {}
        return dict.fromkeys(moments, self.step) | best | {"weights": self.step}


@dataclass(frozen=True, slots=True)
class SavedState:
    """A state on disk, whose metadata has been read."""

    directory: Path
    run: str
    progress: Progress

    def read(self, kind: str, parameters: Tensors) -> dict[str, torch.Tensor] | None:
        """Tensors of one kind, with the shapes and on the devices of `parameters`; None if absent.

        Raises CheckpointError if the file is another run's, or broken.
        """
        step = self.progress.kinds().get(kind)
        if step is None:
            return None
        path = _path(self.directory, step, kind)
        _metadata(path, self.run)
        try:
            return dict(_tensors(path, parameters))
        except (SafetensorError, OSError) as e:
            raise _broken(path, str(e).partition("\n")[0]) from e


def write_state(
    directory: Path, run: str, progress: Progress, tensors: Mapping[str, Tensors]
) -> None:
    """Write the state of the run of this description, and remove those of other steps.

    `tensors` has every kind that the `progress` has.
    """
    kept = set()
    for kind, step in progress.kinds().items():
        path = _path(directory, step, kind)
        kept.add(path)
        metadata = {"format": _FORMAT, "run": run, "state": json.dumps(asdict(progress))}
        # The best parameters of a step are always the same.
        if kind != "best" or not path.exists():
            contents = {name: tensor.detach() for name, tensor in tensors[kind].items()}
            write_tensors(path, contents, metadata)
    for path in _files(directory):
        if path not in kept:
            path.unlink()


def find_state(directory: Path, run: str) -> SavedState | None:
    """The state in `directory`; None if there is none.

    Raises CheckpointError if it is the state of another run than `run`, or broken.
    """
    steps = [int(m[1]) for path in _files(directory) if (m := _WEIGHTS.fullmatch(path.name))]
    if not steps:
        return None
    path = _path(directory, max(steps), "weights")
    metadata = _metadata(path, run)
    try:
        progress = TypeAdapter(Progress).validate_json(metadata.get("state", ""))
    except ValidationError as e:
        raise _broken(path, str(e).partition("\n")[0]) from e
    if progress.step != max(steps):
        raise _broken(path, f"its name says {max(steps)} steps, it says {progress.step}")
    return SavedState(directory, run, progress)


def remove_state(directory: Path) -> None:
    """Remove all states in `directory`."""
    for path in _files(directory):
        path.unlink()


def _files(directory: Path) -> list[Path]:
    return sorted(directory.glob("healing-*.safetensors"))


def _path(directory: Path, step: int, kind: str) -> Path:
    return directory / f"healing-{step}-{kind}.safetensors"


def _metadata(path: Path, run: str) -> dict[str, str]:
    """The metadata of a file. Raises CheckpointError if it is missing, or of another run."""
    try:
        refuse_special(path)
        with safe_open(path, framework="pt") as file:
            metadata: dict[str, str] = file.metadata() or {}
    except (SafetensorError, OSError) as e:
        raise _broken(path, str(e).partition("\n")[0]) from e
    if metadata.get("format") != _FORMAT or metadata.get("run") != run:
        raise CheckpointError(
            f"{path}: the state of another run; remove it to begin again, or resume with what that "
            "run was begun with"
        )
    return metadata


def _tensors(path: Path, parameters: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
    with safe_open(path, framework="pt") as file:
        if set(file.keys()) != parameters.keys():
            raise _broken(path, "has other tensors than the model that is trained")
        for name, parameter in parameters.items():
            tensor = file.get_tensor(name)
            if tensor.shape != parameter.shape or tensor.dtype != torch.float32:
                raise _broken(path, f"{name}: {tensor.dtype} {list(tensor.shape)}")
            if not tensor.isfinite().all():
                raise _broken(path, f"{name}: contains NaN or infinity")
            yield name, tensor.to(parameter.device)


def _broken(path: Path, why: str) -> CheckpointError:
    return CheckpointError(f"{path}: not the state of a healing ({why}); remove it to begin again")

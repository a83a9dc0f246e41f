"""A hostile directory, and the message that must refuse it."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from tests.hostile.formats import CONFIGS, written_tensors
from tests.support.model_files import Tensors, write_model

Write: TypeAlias = Callable[[Path], object]
Change: TypeAlias = Callable[[Tensors], object]


@dataclass(frozen=True)
class Case:
    """A hostile directory.

    Attributes:
        write: Makes the directory.
        says: One line of the output must contain all of these. The first one is the faulty file, or
            whatever else in the directory is at fault.
    """

    write: Write
    says: tuple[str, ...]


def bad_config(raw: Any, *says: str) -> Case:
    """A model with an invalid config.json. `says` holds the faulty key."""
    return written("config.json", raw, *says)


def written(file: str, contents: Any, *says: str) -> Case:
    """A dense model in which one file has other contents: bytes, or JSON."""

    def write(directory: Path) -> None:
        write_model(directory, CONFIGS["dense"])
        if isinstance(contents, bytes):
            (directory / file).write_bytes(contents)
        else:
            (directory / file).write_text(json.dumps(contents))

    return Case(write, (file, *says))


def bad_tensors(
    change: Change,
    *says: str,
    model: str = "gac",
    fill: Mapping[str, bytes] | None = None,
) -> Case:
    """A model in the format `model` with changed tensors. `says` holds the tensor and the fault."""

    def write(directory: Path) -> None:
        def changed(tensors: Tensors) -> None:
            tensors.clear()
            tensors.update(written_tensors(model))
            change(tensors)

        write_model(directory, CONFIGS[model], changed, fill=fill)

    return Case(write, says)

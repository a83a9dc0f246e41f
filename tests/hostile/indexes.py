"""Indexes that name absent files, and files that lead out of the directory."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.hostile.case import Case
from tests.hostile.texts import INDEX
from tests.support.model_files import (
    config,
    read_index,
    shard_bytes,
    tensors_of,
    write_index,
    write_model,
)

DOWN = "model.layers.0.mlp.down_proj.weight"
_FILES: dict[str, Any] = {
    "../": "../model-00001-of-00002.safetensors",
    "an absolute path": "/etc/model.safetensors",
    "a folder": "sub/model.safetensors",
    "a backslash": "..\\model.safetensors",
    "NUL": "model\0.safetensors",
    "a new line": "model\n.safetensors",
    "an escape sequence": "\x1b[2Jmodel.safetensors",
    "a lone surrogate": "\ud800.safetensors",
    "a pickle": "pytorch_model.bin",
    "no name": "",
    "..": "..",
    "null": None,
    "a number": 7,
    "a list": ["model-00001-of-00002.safetensors"],
}
_MAPS: dict[str, Any] = {
    "null": None, "empty": {}, "a list": [], "a string": "model.safetensors", "a number": 1
}  # fmt: skip


def maps(weight_map: Any) -> Case:
    """An index with an invalid weight_map."""

    def write(directory: Path) -> None:
        write_model(directory, config(), shards=2)
        write_index(directory, weight_map)

    return Case(write, (INDEX, "weight_map is missing, empty or not an object"))


def sends_to(file: Any) -> Case:
    """An index that places one tensor in `file`."""

    def write(directory: Path) -> None:
        write_model(directory, config(), shards=2)
        write_index(directory, read_index(directory) | {DOWN: file})

    half = isinstance(file, str) and "\ud800" in file
    said = "half of a character" if half else "not the name of a .safetensors file"
    return Case(write, (INDEX, DOWN, said))


def listed_elsewhere(directory: Path) -> None:
    write_model(directory, config(), shards=2)
    weight_map = read_index(directory)
    other = next(file for file in weight_map.values() if file != weight_map[DOWN])
    write_index(directory, weight_map | {DOWN: other})


def listed_twice(directory: Path) -> None:
    write_model(directory, config(), shards=2)
    path, twice = directory / INDEX, f'"weight_map": {{"{DOWN}": "a.safetensors", '
    path.write_text(path.read_text().replace('"weight_map": {', twice))


def not_listed(directory: Path) -> None:
    write_model(directory, config(), shards=2)
    weight_map = read_index(directory)
    del weight_map[DOWN]
    write_index(directory, weight_map)


def not_there(directory: Path) -> None:
    write_model(directory, config(), lambda tensors: tensors.pop(DOWN), shards=2)
    write_index(directory, read_index(directory) | {DOWN: "model-00001-of-00002.safetensors"})


def in_two_shards(directory: Path) -> None:
    write_model(directory, config(), shards=2)
    third = "model-00003-of-00003.safetensors"
    (directory / third).write_bytes(shard_bytes({DOWN: tensors_of(config())[DOWN]}))
    write_index(directory, read_index(directory) | {"extra": third})


def in_two_files_without_an_index(directory: Path) -> None:
    write_model(directory, config())
    part = {DOWN: tensors_of(config())[DOWN]}
    (directory / "again.safetensors").write_bytes(shard_bytes(part))


def without_a_shard(directory: Path) -> None:
    write_model(directory, config(), shards=3)
    (directory / "model-00002-of-00003.safetensors").unlink()


def with_ten_thousand_shards(directory: Path) -> None:
    write_model(directory, config(), shards=2)
    missing = {f"x{i}": f"model-{i:05}.safetensors" for i in range(10_000)}
    write_index(directory, read_index(directory) | missing)


def linked(file: str) -> Callable[[Path], None]:
    """Replace `file` of the model by a link to a file outside."""

    def write(directory: Path) -> None:
        write_model(directory, config())
        names = tensors_of(config())
        (directory / INDEX).write_text(
            json.dumps({"weight_map": dict.fromkeys(names, "model.safetensors")})
        )
        outside = directory.with_name("outside")
        (directory / file).rename(outside)
        (directory / file).symlink_to(outside)

    return write


def special(file: str, make: Callable[[Path], object]) -> Callable[[Path], None]:
    """Replace `file` of the model by something that `make` makes, which is no regular file."""

    def write(directory: Path) -> None:
        write_model(directory, config())
        (directory / file).unlink(missing_ok=True)
        make(directory / file)

    return write


def to_itself(path: Path) -> None:
    path.symlink_to(path.name)


def to_nothing(path: Path) -> None:
    path.symlink_to("gone")


def to_a_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


_SPECIAL: dict[str, Callable[[Path], object]] = {
    "a directory": Path.mkdir,
    "a pipe": os.mkfifo,
    "a device": to_a_device,
    "a link to nothing": to_nothing,
    "a link to itself": to_itself,
}
_FILES_OF_A_MODEL = ("config.json", "model.safetensors", INDEX)

CASES: dict[str, Case] = {
    **{f"weight_map {name}": maps(weight_map) for name, weight_map in _MAPS.items()},
    **{f"a tensor in {name}": sends_to(file) for name, file in _FILES.items()},
    "a tensor listed in another shard": Case(listed_elsewhere, (INDEX, DOWN, "is not in")),
    "a tensor listed twice": Case(listed_twice, (INDEX, f"'{DOWN}' appears twice")),
    "a tensor not listed": Case(not_listed, (DOWN, "is not listed in", INDEX)),
    "a tensor listed and not there": Case(not_there, (INDEX, DOWN, "is not in model-00001")),
    "a tensor in two shards": Case(in_two_shards, ("model-00003", DOWN, "is also in")),
    "a tensor in two files": Case(in_two_files_without_an_index, (DOWN, "is also in")),
    "a shard is missing": Case(without_a_shard, ("model-00002-of-00003.safetensors: cannot be",)),
    "ten thousand shards": Case(with_ten_thousand_shards, ("more than 1024 shards",)),
    **{
        f"{file} links outside": Case(linked(file), (file, "outside the model directory"))
        for file in _FILES_OF_A_MODEL
    },
    **{
        f"{file} is {name}": Case(special(file, make), (file,))
        for file in _FILES_OF_A_MODEL
        for name, make in _SPECIAL.items()
    },
}

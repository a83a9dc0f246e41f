"""Files of JSON lines that runs append to, and that a killed run may have left cut."""

import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines; none if there is no file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def zipped_lines_of(path: Path) -> list[dict[str, Any]]:
    """The objects of a gzipped file of JSON lines."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def without_a_cut_line(path: Path) -> None:
    """Remove the end of a line that a killed run did not finish."""
    if path.exists():
        text = path.read_text(encoding="utf-8")
        if not text.endswith("\n"):
            path.write_text(text[: text.rfind("\n") + 1], encoding="utf-8")


def append_line(path: Path, line: Mapping[str, Any]) -> None:
    """Append one object; the folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")

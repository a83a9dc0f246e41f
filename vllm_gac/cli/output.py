"""How results are printed: one line of JSON, or text in columns."""

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_gac.shown import one_line, shown


def print_json(value: Mapping[str, Any]) -> None:
    """One line of JSON on stdout."""
    print(json.dumps(value, allow_nan=False))


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns on stdout, as wide as their widest cell; all but the first row is data."""
    table = [[shown(cell) for cell in row] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())


def quoted(path: Path) -> str:
    """`path` as a word of a command line that is to be copied into a shell."""
    name = str(path)
    return one_line(shlex.quote(f"./{name}" if name.startswith("-") else name))


def serve_hint(directory: Path) -> str:
    """The command that serves the model in `directory`."""
    return f"Serve it:    vllm serve {quoted(directory)} --load-format gac"

"""How results are printed: one line of JSON, or text in columns."""

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def print_json(value: Mapping[str, Any]) -> None:
    """One line of JSON on stdout."""
    print(json.dumps(value, allow_nan=False))


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns on stdout, as wide as their widest cell; all but the first row is data."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    for row in (head, *rows):
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())


def quoted(path: Path) -> str:
    """`path` as a word of a command line that is to be copied into a shell."""
    name = str(path)
    return one_line(shlex.quote(f"./{name}" if name.startswith("-") else name))


def serve_hint(directory: Path) -> str:
    """The command that serves the model in `directory`."""
    return f"Serve it:    vllm serve {quoted(directory)} --load-format gac"


def one_line(text: str) -> str:
    """`text` with what would break the line or steer a terminal written as escapes."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)

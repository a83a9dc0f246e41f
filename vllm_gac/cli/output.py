"""Print results, as one line of JSON or as text in columns, and a model's layers as a table."""

import json
import logging
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

from vllm_gac.errors.sanitize import one_line, sanitize, sentence


def print_json(value: Mapping[str, Any]) -> None:
    """Print one line of JSON on stdout."""
    print(json.dumps(value, allow_nan=False))


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print columns on stdout. Each column is as wide as its widest cell."""
    table = [[sanitize(cell) for cell in row] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for row in table:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print("  ".join(cells).rstrip())


def quoted(path: Path) -> str:
    """Quote `path` for a command line that users copy into a shell."""
    name = str(path)
    return one_line(shlex.quote(f"./{name}" if name.startswith("-") else name))


def named(model: Path, revision: str | None, flag: str = "--revision") -> str:
    """A model and its revision on the Hub, if it has one, for such a command line."""
    return quoted(model) if revision is None else f"{quoted(model)} {flag} {shlex.quote(revision)}"


def serve_hint(directory: Path) -> str:
    """The command that serves the model in `directory`."""
    return f"Serve it:    vllm serve {quoted(directory)} --load-format gac"


@contextmanager
def logged_to_stderr(*, warnings_only: bool) -> Iterator[None]:
    """Within the context, print each log message of our modules as one line on stderr."""
    handler, logger = logging.StreamHandler(sys.stderr), logging.getLogger("vllm_gac")
    handler.setFormatter(_Line())
    logger.addHandler(handler)
    before = logger.level, logger.propagate
    logger.setLevel(logging.WARNING if warnings_only else logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.level, logger.propagate = before


class _Line(logging.Formatter):
    """The format of our error messages: the program, then "warning:" for warnings, the message."""

    def format(self, record: logging.LogRecord) -> str:
        kind = "warning: " if record.levelno >= logging.WARNING else ""
        return f"vllm-gac: {kind}{sentence(record.getMessage())}"


def print_layers(layers: Sequence[dict[str, Any]]) -> None:
    """Print one row for each run of equal layers. `layers` are as in config.json."""
    print_table(("layers", "keys", "values", "MLP width", "ranks"), list(_rows(layers)))


def _rows(layers: Sequence[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    for layer, numbers in groupby(range(len(layers)), key=layers.__getitem__):
        first, *rest = numbers
        key, value = layer["key"], layer["value"]
        ranks = [f"{name.split('.')[1]} {rank}" for name, rank in layer["ranks"].items()]
        yield (
            f"{first}-{rest[-1]}" if rest else str(first),
            f"{key['form']} {key['heads']} x {key['size']}",
            f"{value['heads']} x {value['size']}",
            str(layer["intermediate_size"]),
            ", ".join(ranks) or "-",
        )

"""Rows as a Markdown table."""

from collections.abc import Sequence
from typing import Any


def markdown(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Lines of a table of all columns that any row has; - where a row has none, or None."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    for row in rows:
        cells = (row.get(column) for column in columns)
        lines.append("| " + " | ".join("-" if c is None else str(c) for c in cells) + " |")
    return lines

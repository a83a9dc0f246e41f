"""Markdown pages and tables."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

# Text, or lines such as those of a table.
Block: TypeAlias = str | Sequence[str]


def document(title: str, *blocks: Block) -> str:
    """A page: its title, and the blocks that are not empty, with an empty line between them."""
    texts = (block if isinstance(block, str) else "\n".join(block) for block in blocks)
    return "\n\n".join([f"# {title}", *filter(None, texts)]) + "\n"


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """The lines of a Markdown table.

    Args:
        columns: Headers; two columns may share one.
        rows: Cells by column. None is shown as -, and columns that a short row lacks stay empty.
            Floats are shown in full: round or format them before.
    """
    lines = [_line(columns), _line(["---"] * len(columns))]
    for row in rows:
        missing = [""] * (len(columns) - len(row))
        lines.append(_line([*("-" if cell is None else str(cell) for cell in row), *missing]))
    return lines


def table_of_records(records: Sequence[Mapping[str, object]]) -> list[str]:
    """The same of records: every key of any record is a column, and - marks a missing value."""
    columns = list(dict.fromkeys(key for record in records for key in record))
    return table(columns, ([record.get(column) for column in columns] for record in records))


def _line(cells: Sequence[str]) -> str:
    # A bar or a line break would end the cell.
    return "| " + " | ".join(cell.replace("|", "/").replace("\n", " ") for cell in cells) + " |"

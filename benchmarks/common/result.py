"""What a benchmark measured, as a JSON file; `python -m benchmarks.results` makes its page."""

import json
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

# Two numbers are an interval.
Cell: TypeAlias = str | int | float | tuple[float, float] | None
Row: TypeAlias = tuple[Cell, ...] | dict[str, Cell]
Better: TypeAlias = Literal["less", "more"]
RANDOM_WEIGHTS = "random weights"
# What compiles and runs kernels. Only a result of an engine names vLLM.
_SOFTWARE = ("vllm", "torch", "triton")


class Chart(BaseModel):
    """Bars of a result: a group for each row, a bar for each column of `bars`.

    Attributes:
        label: The column that names a row.
        bars: Columns of numbers, as keys. Of those in `Result.compared` the ratio is drawn.
        axis: What the height of a bar means.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    label: str
    bars: tuple[str, ...]
    axis: str


class Result(BaseModel):
    """One result.

    Attributes:
        title: Of the page.
        question: What was to be known.
        answer: In one or two sentences.
        command: What measured it. Paths of a machine are named OUT or RUNS.
        commit: Of the sources that measured.
        date: When, as YYYY-MM-DD.
        gpu: The name of the GPU, or of the processor.
        versions: Of vLLM, torch and others, by package.
        weights: RANDOM_WEIGHTS, "demo model", or the name of the model that was measured.
        columns: Headers; or header by key, if rows are objects. Keys are the headers otherwise.
        rows: Cells by column, or by key; None was not measured.
        tables: Keys of the columns of each table, two tables at most; one with all by default.
        compared: Columns whose cells are compared with those of the first row, and whether less or
            more is better.
        chart: What is drawn, if anything.
        notes: What a reader must know, a sentence or two each.
        failed: What could not be measured, and why.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    title: str
    question: str
    answer: str
    command: str
    commit: str
    date: str
    gpu: str
    versions: dict[str, str]
    weights: str
    columns: tuple[str, ...] | dict[str, str]
    rows: tuple[Row, ...]
    tables: tuple[tuple[str, ...], ...] = Field(default=(), max_length=2)
    compared: dict[str, Better] = {}
    chart: Chart | None = None
    notes: tuple[str, ...] = ()
    failed: dict[str, str] = {}

    @property
    def headers(self) -> dict[str, str]:
        """The header of each column, by key."""
        if isinstance(self.columns, dict):
            return self.columns
        return {column: column for column in self.columns}

    def cell(self, row: Row, key: str) -> Cell:
        """The cell of a row, by the key of its column."""
        return row.get(key) if isinstance(row, dict) else row[list(self.headers).index(key)]

    def write(self, path: Path) -> None:
        """Write the JSON file, a row of the table on each line."""
        fields = self.model_dump(mode="json", exclude_defaults=True)
        rows = ",\n".join(f"  {json.dumps(row, ensure_ascii=False)}" for row in fields["rows"])
        text = json.dumps(fields | {"rows": None}, indent=1, ensure_ascii=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace('"rows": null', f'"rows": [\n{rows}\n ]') + "\n")

    def ratio(self, row: Row, column: str) -> float | None:
        """How many times better than the first row a row is; None without two numbers."""
        value, first = self.cell(row, column), self.cell(self.rows[0], column)
        if not isinstance(value, int | float) or not isinstance(first, int | float):
            return None
        return first / value if self.compared[column] == "less" else value / first

    def values(self, column: str) -> list[float | None]:
        """What is drawn of a column: its numbers, or its ratios if it is compared."""
        if column in self.compared:
            return [self.ratio(row, column) for row in self.rows]
        cells = [self.cell(row, column) for row in self.rows]
        return [cell if isinstance(cell, int | float) else None for cell in cells]


def on_machine(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The fields `gpu` and `versions`, of what `machine` or an engine said."""
    versions = {name: facts[name] for name in _SOFTWARE if name in facts}
    return {"gpu": facts["machine"], "versions": versions}


def command_of(module: str) -> str:
    """The command line of this process; absolute paths are cut to their names."""
    words = [Path(word).name if word.startswith("/") else word for word in sys.argv[1:]]
    return f"python -m {module} {shlex.join(words)}".rstrip()

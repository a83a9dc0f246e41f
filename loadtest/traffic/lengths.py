"""Prompt and output lengths drawn from quantile tables of public production traces.

24 quantiles with log-linear interpolation fit (Kolmogorov-Smirnov distance <= .034), and no single
distribution does (.13 to .21). Input and output lengths are independent, as in the traces (rank
correlation below .08). Sources and licences are copied into every schedule.
"""

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from loadtest.errors import LoadTestError

_FILE = Path(__file__).with_name("length_tables.json")


@dataclass(frozen=True, slots=True)
class LengthTable:
    """Quantiles of the tokens per prompt and per answer, at `probabilities` (ascending, 0 to 1)."""

    probabilities: tuple[float, ...]
    input: tuple[int, ...]
    output: tuple[int, ...]
    attribution: str


def length_table(name: str) -> LengthTable:
    """The table called `name`. Raises LoadTestError if there is no such table."""
    tables = length_tables()
    if name not in tables:
        raise LoadTestError(f"no length table {name!r}; there are {', '.join(sorted(tables))}")
    return tables[name]


@functools.cache
def length_tables() -> Mapping[str, LengthTable]:
    """All shipped tables by name."""
    content = json.loads(_FILE.read_text(encoding="utf-8"))
    return {
        name: LengthTable(
            probabilities=tuple(content["probabilities"]),
            input=tuple(table["input"]),
            output=tuple(table["output"]),
            attribution=f"{table['source']}; {table['license']}; {table['citation']}",
        )
        for name, table in content["tables"].items()
    }

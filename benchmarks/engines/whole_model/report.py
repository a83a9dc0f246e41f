"""The result of a run: seconds of each batch, compared with the first cell."""

import json
import shlex
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.json_lines import lines_of
from benchmarks.common.result import RANDOM_WEIGHTS, Better, Cell, Chart, Result, on_machine
from benchmarks.engines.whole_model.cells import CELLS, TWO_GPUS
from benchmarks.engines.whole_model.models import BATCHES, SEQUENCES
from benchmarks.engines.whole_model.serve import ROWS
from benchmarks.engines.whole_model.two_gpus import result_of_two

MODULE = "benchmarks.engines.whole_model"


def result_of(runs: Path) -> Result:
    """The result of a directory of rows.

    Raises:
        SystemExit: Nothing was timed yet.
    """
    rows = lines_of(runs / ROWS)
    facts = json.loads((runs / "run.json").read_text())
    starts = {row["cell"]: row for row in rows if "startup_seconds" in row}
    times = {(row["cell"], row["batch"]): row for row in rows if "batch" in row}
    timed = {batch for _, batch in times}
    if not times:
        raise SystemExit(f"{runs / ROWS}: nothing is timed yet; run it first")
    if any(cell.split and cell.name in starts for cell in TWO_GPUS):
        about = facts | on_machine(next(iter(starts.values()))) | {"failed": _failures(rows)}
        return result_of_two(rows, about | {"command": f"python -m {MODULE} run OUT --two-gpus"})
    served = [cell for cell in CELLS if cell.name in starts]
    # By column: the batch, which of its times, and by what that is divided.
    whole = {f"{b.name}, s": (b, "seconds", 1.0) for b in BATCHES + SEQUENCES if b.name in timed}
    steps = {
        f"{b.prompts} decoding, ms a step": (b, "decode_seconds", (b.output - 1) / 1000)
        for b in SEQUENCES
        if b.name in timed
    }
    columns = whole | steps
    table: list[tuple[Cell, ...]] = [
        (
            cell.name,
            starts[cell.name]["kv_tokens"],
            *(_time(times.get((cell.name, b.name)), of, by) for b, of, by in columns.values()),
        )
        for cell in served
    ]
    compared: dict[str, Better] = {"KV tokens": "more"}
    compared |= dict.fromkeys(columns, "less")
    names = ",".join(cell.name for cell in served)
    asked = "--free" if timed <= {b.name for b in SEQUENCES} else f"--cells {shlex.quote(names)}"
    return Result(
        title="Models of Llama-3-8B's shape in vLLM",
        question="How fast is each model, and how many tokens does its cache hold?",
        answer=_answer(table),
        command=f"python -m {MODULE} run OUT {asked}",
        commit=facts["commit"],
        date=facts["date"],
        **on_machine(starts[served[-1].name]),
        weights=RANDOM_WEIGHTS,
        columns=("model", "KV tokens", *columns),
        rows=tuple(table),
        tables=(("model", "KV tokens", *whole), ("model", *steps)) if steps else (),
        compared=compared,
        chart=Chart(label="model", bars=tuple(whole), axis=f"times as fast as {table[0][0]}"),
        notes=(
            "A batch is prompts x their length -> tokens of each answer; seconds are the median of "
            "its runs. One engine a row, vLLM's defaults. Behind a model are the types of "
            "weights+cache.",
            *dict.fromkeys(f"{cell.model}: {starts[cell.name]['what']}." for cell in served),
        ),
        failed=_failures(rows),
    )


def _time(row: Mapping[str, Any] | None, of: str, by: float) -> Cell:
    """The median of a batch's times, divided by `by`."""
    return None if row is None else float(f"{statistics.median(row[of]) / by:.4g}")


def _answer(table: Sequence[Sequence[Cell]]) -> str:
    """The least and the most that each model gains over the first one."""
    first, *others = table
    parts = []
    for row in others:
        pairs = zip(first[2:], row[2:], strict=True)
        ratios = [
            a / b for a, b in pairs if isinstance(a, int | float) and isinstance(b, int | float)
        ]
        if ratios:
            parts.append(f"{row[0]} {min(ratios):.2f} to {max(ratios):.2f}")
    return f"Times as fast as {first[0]}: {'; '.join(parts) or 'nothing to compare'}."


def _failures(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    last = {row["cell"]: row for row in rows}
    return {cell: row["error"] for cell, row in last.items() if "error" in row}

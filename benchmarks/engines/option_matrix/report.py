"""The page of the matrix."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from benchmarks.common.markdown import table_of_records
from benchmarks.common.page import origin
from benchmarks.engines.option_matrix.engine_args import ELSEWHERE, in_cells
from benchmarks.engines.option_matrix.verdict import FAULT, NOT_FINISHED, REFUSED, RIGHT

ANSWERED = (RIGHT, REFUSED)


def page(result: dict[str, Any]) -> str:
    """The page: a summary, the faults, all cells, missing pairs, and vLLM's options."""
    cells = result["cells"]
    counts = Counter(cell["verdict"] for cell in cells.values())
    device = "cpu" if "--device cpu" in result["command"] else "cuda"
    lines = [
        f"# Engine options by pairs, on {'a CPU' if device == 'cpu' else 'a GPU'}",
        "",
        f"{origin(result)}; {result['at_once']} at a time. That is the last run;",
        "a cell that has a result is not served again, and the JSON file has the commit of each.",
        "",
        *_missing(result["listed"], len(cells)),
        f"{len(cells)} engines, one a row: "
        + ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items()))
        + ". Each serves a random model of the named kind and is compared with the fp32 reference",
        "on the same weights (`vllm_gac/compression/reference_model.py`): every greedy token and",
        "the top five logprobs of each step for five prompts, twice (the second time from the",
        "prefix cache), and the logprobs of prompts. The numbers are the largest error of a",
        "logprob. Allowed are 0.002 in fp32, 0.05 in fp16 and 0.25 in bf16. Where something is",
        "rounded to eight bits, a mean error of a fifth of the spread is allowed; with an adapter",
        "in fp16 or bf16, one of 0.05 or 0.3 of the spread (`cells.py` says why). A refused engine",
        "is refused at the start, in the sentence that the row shows. An engine that is not",
        "finished was ended, which says nothing about right or wrong.",
        "",
        *_table("Faults", {name: c for name, c in cells.items() if c["verdict"] == FAULT}),
        *_table("Cells", {name: c for name, c in cells.items() if c["verdict"] in ANSWERED}),
        *_table("Not finished", {n: c for n, c in cells.items() if c["verdict"] == NOT_FINISHED}),
        "## Factors",
        "",
        "Every two levels of two factors meet in at least one cell. The name of a cell leaves out",
        "the first level of each factor.",
        "",
        *table_of_records(
            [
                {"factor": factor, "levels": ", ".join(levels)}
                for factor, levels in result["pairs"]["factors"].items()
            ]
        ),
        "",
        "No cell has these pairs:",
        "",
        *(f"- {_rows(rows)}: {why}" for why, rows in result["impossible"].items()),
        "",
        *_options(cells),
    ]
    return "\n".join(lines)


def _missing(listed: int, known: int) -> list[str]:
    if listed == known:
        return []
    return [f"**Partial: {listed - known} of the list's {listed} cells have no result yet.**", ""]


def _table(title: str, cells: Mapping[str, Any]) -> list[str]:
    if not cells:
        return []
    rows = [
        {"cell": name, "": cell["verdict"], "errors, or the sentence": cell["says"][:600]}
        for name, cell in cells.items()
    ]
    return [f"## {title}", "", *table_of_records(rows), ""]


def _rows(rows: list[dict[str, str]]) -> str:
    return "; ".join(" with ".join(row.values()) for row in rows)


def _options(cells: Mapping[str, Any]) -> list[str]:
    return [
        "## vLLM's options",
        "",
        "The fields of vLLM's `EngineArgs`. Those in cells of this page: "
        + ", ".join(f"`{name}`" for name in sorted(in_cells(cells.values())))
        + ".",
        "",
        "Those in no cell, by reason:",
        "",
        *(
            f"- {why}: {', '.join(f'`{name}`' for name in names)}."
            for why, names in ELSEWHERE.items()
        ),
        "",
    ]

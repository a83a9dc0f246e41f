"""How much starts of one server differ under the same load: from the reports of `loadtest ab`.

    python -m benchmarks.engines.starts OUT build/starts/*  # OUT.json and OUT.md

Each directory has the report.csv of one start, by loadtest/comparisons/starts.yaml. Two rates share
a start: what their medians have in common from start to start is the server's, and the rest is
noise. So the common part is the square root of their covariance, and at most that of the
covariance and two standard errors.
"""

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.common.markdown import document, table
from benchmarks.common.page import documented, save

MEASURES = {
    "ttft": "first token",
    "tpot": "time per token after the first",
    "itl": "between tokens",
    "e2e": "whole answer",
}


def main() -> None:
    """Read the reports, and write the page."""
    parser = documented(__doc__)
    parser.add_argument("out", type=Path, help="path without suffix")
    parser.add_argument("starts", type=Path, nargs="+", help="directories of report.csv")
    args = parser.parse_args()
    result = {"rows": list(spreads([medians(path / "report.csv") for path in args.starts]))}
    save(args.out, result, page(result, len(args.starts)))


def medians(path: Path) -> dict[tuple[str, float], float]:
    """The medians, in seconds, that a report has of one server, by measure and rate.

    Raises:
        SystemExit: It has more servers than one, or more kinds of traffic.
    """
    with path.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["statistic"] == "p50"]
    found = {(r["measure"], float(r["rate"])): float(r["value"]) for r in rows}
    if len(found) != len(rows):
        raise SystemExit(f"{path}: has several servers or kinds of traffic; expected one of each")
    return found


def spreads(starts: Sequence[Mapping[tuple[str, float], float]]) -> Iterator[dict[str, Any]]:
    """Of each measure: its medians by rate, [starts] each, and how much they differ."""
    rates = sorted({rate for _, rate in starts[0]})
    for measure in MEASURES:
        values = np.array([[start[measure, rate] for start in starts] for rate in rates])
        covariance = np.atleast_2d(np.cov(np.log(values)))  # of two rates or one
        yield {
            "measure": measure,
            "rates": rates,
            "seconds": values.tolist(),
            "deviation": np.sqrt(covariance.diagonal()).tolist(),
            "common": _root(shared := float(covariance[0, -1])),
            "common_at_most": _root(shared + 2 * _error(covariance, len(starts))),
        }


def _root(covariance: float) -> float:
    return math.sqrt(max(covariance, 0.0))


def _error(covariance: NDArray[np.float64], starts: int) -> float:
    """The standard error of a covariance of two normal variables."""
    squares = covariance[0, 0] * covariance[-1, -1] + covariance[0, -1] ** 2
    return math.sqrt(float(squares) / (starts - 1))


def page(result: Mapping[str, Any], starts: int) -> str:
    """The page of a result."""
    rates = result["rows"][0]["rates"]
    columns = ["median of", *(f"{rate:g}/s, ms (deviation)" for rate in rates), "in common"]
    rows = []
    for row in result["rows"]:
        each = zip(row["seconds"], row["deviation"], strict=True)
        cells = (f"{1e3 * np.mean(s):.4g} ({deviation:.1%})" for s, deviation in each)
        rows.append([MEASURES[row["measure"]], *cells, f"{row['common']:.1%}"])
        rows[-1][-1] += f" (at most {row['common_at_most']:.1%})"
    about = (
        f"{starts} starts of one server, each with the same traffic, at the rates of the columns. "
        "*Deviation* is one standard deviation between starts. *In common* is what both rates "
        "share: the square root of their covariance, with its limit."
    )
    return document("How much starts of one server differ", about, table(columns, rows))


if __name__ == "__main__":
    main()

"""What `train` and `measure` wrote about a model, read back: run.json, log.jsonl, rows.jsonl."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.json_lines import lines_of
from benchmarks.quality.ladder.rows import DENSE, ROWS, SERVED
from benchmarks.quality.ladder.training import Point
from vllm_gac.checkpoint.strict_json import read_json
from vllm_gac.errors import GacError
from vllm_gac.steps.perplexity_ratio import ratio

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Model:
    """A rung of the ladder.

    Attributes:
        name: Of its folder.
        run: The training run.
        curve: The learning curve.
        by_text: Rows by name, for the number of each calibration text; those of text 0 in order.
    """

    name: str
    run: Mapping[str, Any]
    curve: Sequence[Point]
    by_text: Mapping[int, Mapping[str, Row]]

    @property
    def rows(self) -> Mapping[str, Row]:
        """Those that were calibrated on the first text."""
        return self.by_text[0]

    @property
    def dense(self) -> Row:
        """The row of the dense model, by the reference."""
        return self.rows[DENSE]

    @property
    def scored(self) -> dict[str, Row]:
        """The rows that were not refused."""
        return {name: row for name, row in self.rows.items() if "losses" in row}

    def over(self, row: Row, other: Row) -> tuple[float, float, float]:
        """Perplexity of `row` over that of `other`, and its 95 % interval."""
        return ratio(row["losses"], other["losses"], self.dense["document"])

    def over_dense(self, row: Row) -> tuple[float, float, float]:
        """The same over the dense model, by vLLM in bf16 if that is what scored `row`."""
        served = row.get("served") and "losses" in self.rows.get(SERVED, {})
        return self.over(row, self.rows[SERVED] if served else self.dense)


def read_models(directory: Path) -> list[Model]:
    """The models of the folders of `directory`, small ones first.

    Raises GacError if there is none, or rows are of other weights than its run.
    """
    models = [_model(rows.parent) for rows in sorted(directory.glob("*/rows.jsonl"))]
    if not models:
        raise GacError(f"{directory}: no folder with run.json, log.jsonl and rows.jsonl")
    models.sort(key=lambda model: (model.run["parameters"], model.run["rope_theta"]))
    return models


def _model(folder: Path) -> Model:
    run = read_json(folder / "run.json")
    points = [Point(**point) for point in lines_of(folder / "log.jsonl")]
    by_text: dict[int, dict[str, Row]] = {}
    for row in lines_of(folder / "rows.jsonl"):
        if row["weights_sha256"] != run["weights_sha256"]:
            weights = row["weights_sha256"]
            raise GacError(f"{folder / 'rows.jsonl'}: rows of other weights, {weights}")
        by_text.setdefault(row["calibration"], {})[row["row"]] = row
    if DENSE not in (rows := by_text.get(0, {})):
        raise GacError(f"{folder / 'rows.jsonl'}: no row of the dense model; measure it first")
    by_text[0] = {name: rows[name] for name in ROWS if name in rows}
    return Model(folder.name, run, points, by_text)

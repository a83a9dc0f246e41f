"""The page of the ladder: a table of rows for each model, aligned against free dims, a picture.

A directory of results has a folder for each model, with what `train` and `measure` wrote: run.json,
log.jsonl and rows.jsonl.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from scipy.stats import spearmanr

from benchmarks.common.figures import BLUE, GREEN, GREY, ORANGE, PINK, RED, axes_grid, drawn
from benchmarks.common.markdown import table
from benchmarks.common.page import origin
from benchmarks.quality.ladder.intervals import ratio
from benchmarks.quality.ladder.measure import rows_of
from benchmarks.quality.ladder.rows import DENSE, FREE, PLAIN, ROWS
from benchmarks.quality.ladder.text import WINDOW
from benchmarks.quality.ladder.training import Point, card
from vllm_gac.checkpoint.strict_json import read_json
from vllm_gac.errors import GacError

_LEAST_RANKED = 4
_LEAST_SHOWN = 0.005  # %
_COMMAND = "python -m benchmarks.quality.ladder"
_COLOURS = {
    "low rank": BLUE,
    "heads + MLP": RED,
    "KV": GREEN,
    "all methods": ORANGE,
    "dense": PINK,
}
_MARKERS = ("o", "s", "^", "D")


@dataclass(frozen=True, slots=True)
class Model:
    """A rung: its name, its training run, its learning curve, and its rows by name."""

    name: str
    run: Mapping[str, Any]
    curve: Sequence[Point]
    rows: Mapping[str, Mapping[str, Any]]

    @property
    def dense(self) -> Mapping[str, Any]:
        """The row of the dense model, by the reference."""
        return self.rows[DENSE]

    def over(self, row: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[float, float, float]:
        """Perplexity of `row` over that of `other`, and its 95 % interval."""
        return ratio(row["losses"], other["losses"], self.dense["document"])


def write_report(directory: Path) -> str:
    """Write README.md, ladder.svg and a card for each model into `directory`. Returns the page.

    Raises GacError if no folder of it has the rows of a model.
    """
    models = [_model(rows.parent) for rows in sorted(directory.glob("*/rows.jsonl"))]
    if not models:
        raise GacError(f"{directory}: no folder with run.json, log.jsonl and rows.jsonl")
    models.sort(key=lambda model: (model.run["parameters"], model.run["rope_theta"]))
    page, picture = drawn(_drawn, models)
    (directory / "ladder.svg").write_text(picture, encoding="utf-8")
    (directory / "README.md").write_text(page, encoding="utf-8")
    for model in models:
        about = card(dict(model.run), list(model.curve))
        (directory / model.name / "README.md").write_text(about, encoding="utf-8")
    return page


def _model(folder: Path) -> Model:
    run = read_json(folder / "run.json")
    points = [Point(**point) for point in rows_of(folder / "log.jsonl")]
    rows = {row["row"]: row for row in rows_of(folder / "rows.jsonl")}
    if DENSE not in rows:
        raise GacError(f"{folder / 'rows.jsonl'}: no row of the dense model; measure it first")
    if others := {row["weights_sha256"] for row in rows.values()} - {run["weights_sha256"]}:
        raise GacError(f"{folder / 'rows.jsonl'}: rows of other weights, {', '.join(others)}")
    ordered = {name: rows[name] for name in ROWS if name in rows}
    return Model(folder.name, run, points, ordered)


def _drawn(models: Sequence[Model]) -> tuple[str, Figure]:
    return _page(models), _picture(models)


def _page(models: Sequence[Model]) -> str:
    lines = [
        "# What compression costs models of growing size",
        "",
        "Llamas trained on [text at hand](../../../quality/ladder/text.py) and compressed by the",
        "project's own commands. Perplexity on held-out text over the dense model's, with 95 %",
        f"intervals over documents; windows of {WINDOW} tokens, by the fp32 reference unless the",
        "row says FP8 or served, which vLLM computes. Nothing is trained after compression unless",
        "the row says healed. Plain fits fit each linear by itself, to its own output on the dense",
        "model's inputs. These models saw few tokens: a model that is trained for longer has less",
        "room, and loses more. So the rows of one model may be compared with each other, and none",
        "of them promises what a larger model loses.",
        "",
        "![Perplexity against bytes and predicted time](ladder.svg)",
    ]
    if len(models) > 1:
        lines += ["", *_by_size(models)]
    for model in models:
        lines += ["", *_of_a_model(model)]
    return "\n".join(lines) + "\n"


def _by_size(models: Sequence[Model]) -> list[str]:
    """What each row loses, a column for each model. Two models are no law, so there is no fit."""
    rows = []
    for name in ROWS:
        found = [model.rows.get(name, {}) for model in models]
        if name == DENSE or _is_variant(name) or not all("losses" in row for row in found):
            continue
        over = (m.over(row, m.dense)[0] for m, row in zip(models, found, strict=True))
        rows.append([name, *(f"{100 * (value - 1):.2f} %" for value in over)])
    heads = [f"{m.name}, {m.run['trained_tokens'] / 1e6:.0f} M tokens" for m in models]
    return ["## Perplexity lost, by model", "", *table(["row", *heads], rows)]


def _of_a_model(model: Model) -> list[str]:
    dense, run = model.dense, model.run
    loss = sum(dense["losses"]) / len(dense["losses"])
    rows = [r for r in model.rows.values() if "losses" in r and not _is_variant(r["row"])]
    lines = [
        f"## {model.name}: {run['parameters'] / 1e6:.1f} M parameters",
        "",
        f"[Trained]({model.name}/README.md) on {run['trained_tokens'] / 1e6:.0f} M tokens in "
        f"{run['seconds']:.0f} s. Held-out perplexity {math.exp(loss):.3f}, over "
        f"{len(dense['losses'])} windows of {len(set(dense['document']))} documents. "
        f"{origin({**dense, 'command': f'{_COMMAND} measure'})}.",
        "",
    ]
    columns = ["row", "parameters", "KV", "MB", "predicted time", "perplexity over dense"]
    lines += table([*columns, "predicted"], [_cells(model, row) for row in rows])
    lines += ["", *_predictions(model)]
    for end, heading in (
        (FREE, "aligned dims over free dims"),
        (PLAIN, "fits as they are over plain fits"),
    ):
        if pairs := _pairs(model, end):
            lines += ["", *table(["budget", heading], pairs)]
    names = list(dense["tasks"])
    tasks = [
        [row["row"], *(f"{row['tasks'][name]['right']:.3f}" for name in names)]
        for row in rows
        if "tasks" in row
    ]
    lines += [
        "",
        "Share of right tokens: of a six-digit number that was assigned to a name earlier in the "
        "text (needle), and of a text's second copy, by the length of the whole.",
        "",
        *table(["row", *names], tasks),
    ]
    if refused := [row for row in model.rows.values() if "refused" in row]:
        lines += ["", "Not made:", ""]
        lines += [f"- {row['row']}: {row['refused'].splitlines()[-1]}" for row in refused]
    return lines


def _cells(model: Model, row: Mapping[str, Any]) -> list[str | None]:
    dense, expected, time = model.dense, row.get("expected_loss"), row["microseconds"]
    return [
        row["row"],
        f"{row['parameters'] / dense['parameters']:.1%}",
        f"{row['kv_bytes'] / dense['kv_bytes']:.1%}",
        f"{row['weight_bytes'] / 1e6:.1f}",
        None if time is None else f"{time / dense['microseconds']:.1%}",
        "1" if row is dense else _interval(*model.over(row, dense)),
        None if expected is None else f"{math.exp(expected):.4f}",
    ]


def _predictions(model: Model) -> list[str]:
    """How well the plans' predicted losses rank the real ones."""
    pairs = [
        (row["expected_loss"], model.over(row, model.dense)[0])
        for name, row in model.rows.items()
        if "losses" in row
        and row.get("expected_loss") is not None
        and not (ROWS[name].healed or ROWS[name].plain_fits)
    ]
    if len(pairs) < _LEAST_RANKED:
        return ["Predicted: what the plan expects, as a ratio."]
    found = spearmanr(*zip(*pairs, strict=True)).statistic
    return [
        "Predicted: what the plan expects, as a ratio. Predicted and real losses of all "
        f"{len(pairs)} plans have a rank correlation of {found:.2f}.",
    ]


def _pairs(model: Model, end: str) -> list[list[str]]:
    """Each row over the one of the same name with this `end`."""
    return [
        [name, _interval(*model.over(row, model.rows[name + end]))]
        for name, row in model.rows.items()
        if "losses" in row and "losses" in model.rows.get(name + end, {})
    ]


def _is_variant(name: str) -> bool:
    """Whether a row is only there to be compared with another one."""
    return name.endswith((FREE, PLAIN))


def _interval(middle: float, low: float, high: float) -> str:
    return f"{middle:.4f} ({low:.4f} to {high:.4f})"


def _picture(models: Sequence[Model]) -> Figure:
    figure, panels = axes_grid(9.5, 3.4, 1, 3)
    for panel, (key, label) in zip(
        panels,
        (
            ("weight_bytes", "weights, bytes over dense"),
            ("kv_bytes", "KV cache, bytes over dense"),
            ("microseconds", "predicted time of a step over dense (bf16)"),
        ),
        strict=True,
    ):
        for model, marker in zip(models, _MARKERS, strict=False):
            for row in model.rows.values():
                if "losses" not in row or row["row"] == DENSE or _is_variant(row["row"]):
                    continue
                if row[key] is None:
                    continue
                middle, low, high = map(_lost, model.over(row, model.dense))
                panel.errorbar(
                    row[key] / model.dense[key],
                    middle,
                    [[max(0.0, middle - low)], [max(0.0, high - middle)]],
                    fmt=marker,
                    color=_colour(row["row"]),
                    markersize=4,
                    linewidth=1,
                    markerfacecolor="none" if row.get("served") else _colour(row["row"]),
                )
        panel.set_xlabel(label)
        panel.set_yscale("log")
    panels[0].set_ylabel("perplexity lost, %")
    for name, colour in _COLOURS.items():
        panels[0].plot([], [], "o", color=colour, markersize=4, label=name)
    for model, marker in zip(models, _MARKERS, strict=False):
        panels[1].plot([], [], marker, color=GREY, markersize=4, label=model.name)
    panels[0].legend(fontsize=7)
    panels[1].legend(fontsize=7)
    panels[2].set_title("hollow: served in FP8 or bf16", fontsize=8)
    return figure


def _lost(over_dense: float) -> float:
    """Percent, at least what the logarithmic axis shows."""
    return max(_LEAST_SHOWN, 100 * (over_dense - 1))


def _colour(name: str) -> str:
    return next(colour for form, colour in _COLOURS.items() if name.startswith(form))

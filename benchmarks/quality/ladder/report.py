"""The page of the ladder: a table of rows for each model, aligned against free dims, a picture.

A directory of results has a folder for each model, with what `train` and `measure` wrote: run.json,
log.jsonl and rows.jsonl.
"""

import math
from collections.abc import Callable, Sequence
from itertools import cycle
from operator import itemgetter
from pathlib import Path

from matplotlib.figure import Figure
from scipy.stats import spearmanr

from benchmarks.common.figures import BLUE, GREEN, GREY, ORANGE, PINK, RED, axes_grid, drawn
from benchmarks.common.markdown import table
from benchmarks.common.page import origin
from benchmarks.quality.ladder.goals import other_dims, other_times, reached
from benchmarks.quality.ladder.pareto import microseconds, what_to_buy
from benchmarks.quality.ladder.published import published
from benchmarks.quality.ladder.results import Model, Row, read_models
from benchmarks.quality.ladder.rows import DENSE, FREE, PLAIN, ROWS, SERVED, is_variant
from benchmarks.quality.ladder.scaling import by_size
from benchmarks.quality.ladder.text import WINDOW
from benchmarks.quality.ladder.training import card
from vllm_gac.steps.perplexity_ratio import shown

_MIN_RANKED = 4
_MIN_SHOWN = 0.005  # %
_COMMAND = "python -m benchmarks.quality.ladder"
_COLOURS = {
    "low rank": BLUE,
    "heads + MLP": RED,
    "KV": GREEN,
    "all methods": ORANGE,
    "dense": PINK,
}
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*")


def write_report(directory: Path) -> str:
    """Write README.md, ladder.svg and a card for each model into `directory`. Returns the page.

    Raises GacError if no folder of it has the rows of a model.
    """
    models = read_models(directory)
    page, picture = drawn(_drawn, models)
    (directory / "ladder.svg").write_text(picture, encoding="utf-8")
    (directory / "README.md").write_text(page, encoding="utf-8")
    for model in models:
        about = card(dict(model.run), list(model.curve))
        (directory / model.name / "README.md").write_text(about, encoding="utf-8")
    return page


def _drawn(models: Sequence[Model]) -> tuple[str, Figure]:
    return _page(models), _picture(models)


def _page(models: Sequence[Model]) -> str:
    seen = [model.run["trained_tokens"] / model.run["parameters"] for model in models]
    lines = [
        "# What compression costs models of growing size",
        "",
        "Llamas trained on [text at hand](../../../quality/ladder/text.py) and compressed by the",
        "project's own commands. Perplexity on held-out text over the dense model's, with 95 %",
        f"intervals over documents; windows of {WINDOW} tokens, by the fp32 reference (on a GPU",
        "its scores use TF32). Rows of FP8 are computed by vLLM, and are over the dense model as",
        "vLLM computes it in bf16. Nothing is trained after compression unless a row says healed.",
        "Plain fits fit each linear by itself, to its own output on the dense model's inputs.",
        "Times are predicted from the profile of an H200; those of FP8 are what FP8 took of the",
        "time of bf16 in [combinations](../../combinations_h200.md), on a model of 8 B.",
        "",
        f"These models saw {min(seen):.1f} to {max(seen):.0f} tokens a parameter, and a model that",
        "is trained for longer has less room. So the rows of one model may be compared with each",
        "other, and none of them promises what a larger model loses.",
        "The next-line task by lm-eval, asked of 30m-longest, is on [a page of its",
        "own](../../evaluation_ladder_cpu.md).",
        "",
        "![Perplexity against bytes and predicted time](ladder.svg)",
        "",
        *reached(models),
    ]
    for model in models:
        lines += ["", *of_a_model(model)]
    if len(models) > 1:
        lines += ["", *by_size(models)]
    lines += ["", *published()]
    return "\n".join(lines) + "\n"


def of_a_model(model: Model) -> list[str]:
    """The section of a model."""
    dense, run = model.dense, model.run
    loss = sum(dense["losses"]) / len(dense["losses"])
    rows = [r for r in model.rows.values() if "losses" in r and not is_variant(r["row"])]
    lines = [
        f"## {model.name}: {run['parameters'] / 1e6:.1f} M parameters",
        "",
        f"[Trained]({model.name}/README.md) on {run['trained_tokens'] / 1e6:.0f} M tokens in "
        f"{run['seconds']:.0f} s, RoPE's base {run['rope_theta']:.0f}. "
        f"Held-out perplexity {math.exp(loss):.3f}, over {len(dense['losses'])} windows of "
        f"{len(set(dense['document']))} documents. "
        f"{origin({**dense, 'command': f'{_COMMAND} measure'})}.",
        "",
    ]
    columns = ["row", "parameters", "KV", "MB", "predicted time", "perplexity over dense"]
    lines += table([*columns, "predicted"], [_cells(model, row) for row in rows])
    lines += ["", *_predictions(model), *other_dims(model), *other_times(model)]
    for end, heading in (
        (FREE, "aligned dims over free dims"),
        (PLAIN, "fits as they are over plain fits"),
    ):
        if pairs := _pairs(model, end):
            lines += ["", *table(["budget", heading], pairs)]
    if len(model.by_text) > 1:
        lines += ["", "Perplexity over dense, calibrated on different texts:", "", *_texts(model)]
    lines += ["", f"### What to buy, {model.name}", "", *what_to_buy(model)]
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


def _cells(model: Model, row: Row) -> list[str | None]:
    dense, expected = model.dense, row.get("expected_loss")
    return [
        row["row"],
        f"{row['parameters'] / dense['parameters']:.1%}",
        f"{row['kv_bytes'] / dense['kv_bytes']:.1%}",
        f"{row['weight_bytes'] / 1e6:.1f}",
        f"{microseconds(row) / dense['microseconds']:.1%}",
        "1" if row is dense else shown(*_over(model, row)),
        None if expected is None else f"{math.exp(expected):.4f}",
    ]


def _over(model: Model, row: Row) -> tuple[float, float, float]:
    """As `Model.over_dense`; the dense model as served, too, is over the reference."""
    return model.over(row, model.dense) if row["row"] == SERVED else model.over_dense(row)


def _predictions(model: Model) -> list[str]:
    """How well the plans' predicted losses rank the real ones."""
    pairs = [
        (row["expected_loss"], model.over(row, model.dense)[0])
        for name, row in model.rows.items()
        if "losses" in row
        and row.get("expected_loss") is not None
        and not (ROWS[name].healed or ROWS[name].plain_fits or ROWS[name].served)
    ]
    if len(pairs) < _MIN_RANKED:
        return ["Predicted: what the plan expects, as a ratio."]
    found = spearmanr(*zip(*pairs, strict=True)).statistic
    return [
        "Predicted: what the plan expects, as a ratio. Predicted and real losses of all "
        f"{len(pairs)} plans have a rank correlation of {found:.2f}.",
    ]


def _pairs(model: Model, end: str) -> list[list[str]]:
    """Each row over the one of the same name with this `end`."""
    return [
        [name, shown(*model.over(row, model.rows[name + end]))]
        for name, row in model.rows.items()
        if "losses" in row and "losses" in model.rows.get(name + end, {})
    ]


def _texts(model: Model) -> list[str]:
    """Each row that was calibrated on every text, over the dense model."""
    texts = [model.by_text[number] for number in sorted(model.by_text)]
    rows = [
        [name, *(shown(*model.over_dense(text[name])) for text in texts)]
        for name in model.scored
        if name != DENSE and all("losses" in text.get(name, {}) for text in texts)
    ]
    return table(["row", *(f"text {number}" for number in sorted(model.by_text))], rows)


def _picture(models: Sequence[Model]) -> Figure:
    figure, panels = axes_grid(9.5, 3.4, 1, 3)
    costs: tuple[tuple[Callable[[Row], float], str], ...] = (
        (itemgetter("weight_bytes"), "weights, bytes over dense"),
        (itemgetter("kv_bytes"), "KV cache, bytes over dense"),
        (microseconds, "predicted time of a step over dense"),
    )
    for panel, (cost, label) in zip(panels, costs, strict=True):
        for model, marker in zip(models, cycle(_MARKERS), strict=False):
            for row in model.scored.values():
                if row["row"] in (DENSE, SERVED) or is_variant(row["row"]):
                    continue
                middle, low, high = map(_lost, model.over_dense(row))
                panel.errorbar(
                    cost(row) / cost(model.dense),
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
    for model, marker in zip(models, cycle(_MARKERS), strict=False):
        panels[1].plot([], [], marker, color=GREY, markersize=4, label=model.name)
    panels[0].legend(fontsize=7)
    panels[1].legend(fontsize=7)
    panels[2].set_title("hollow: by vLLM, in FP8", fontsize=8)
    return figure


def _lost(over_dense: float) -> float:
    """Percent, at least what the logarithmic axis shows."""
    return max(_MIN_SHOWN, 100 * (over_dense - 1))


def _colour(name: str) -> str:
    return next(colour for form, colour in _COLOURS.items() if name.startswith(form))

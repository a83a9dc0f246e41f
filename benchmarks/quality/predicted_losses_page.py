"""The page of expected and measured losses of plans, of the rows that have been measured."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from scipy.stats import spearmanr, t

from benchmarks.common.markdown import table
from benchmarks.common.page import origin

Row: TypeAlias = Mapping[str, Any]

# Requests where the second of two allows more than the first.
FREEDOMS = (
    ("heads,prune", "heads,prune,lowrank"),
    ("heads,lowrank", "heads,prune,lowrank"),
    ("heads, rotary keys", "heads, auto keys"),
    ("heads, latent keys", "heads, auto keys"),
)
# No correlation of fewer plans is shown.
_FEWEST = 5
_SMALL = 0.01
# What is measured of a smaller loss is noise.
_LEAST = 0.001
_MEANING = {
    "now": "*Now* is as `vllm-gac compress` makes the weights.",
    "not refitted": "*Not refitted* leaves out the last step, which fits layers to what the "
    "compressed layers before them give.",
    "as before": "*As before* also leaves out the metric of the outputs in low rank.",
}


def page(rows: Sequence[Row], about: Mapping[str, Any]) -> str:
    """The tables in Markdown.

    Args:
        rows: That of the dense model, and those of the plans in any order, with losses and
            divergences by window.
        about: The provenance.
    """
    dense = np.asarray(rows[0]["losses"])
    plans = [
        {
            **row,
            "lost": np.asarray(row["losses"]) - dense,
            "divergence": statistics.mean(row["divergences"]),
        }
        for row in rows[1:]
    ]
    first = [row for row in plans if row["seed"] == 0]
    fits = list(dict.fromkeys(row["fit"] for row in first))
    others = len(plans) - len(first) or "none"
    lines = [
        "# Expected and measured losses of plans",
        "",
        f"Demo model, {len(first)} compressions by {len({_plan(r) for r in first})} plans of one "
        f"calibration text, and {others} of other texts. Each is scored on {len(dense)} windows of "
        f"held-out text, where the dense model has a perplexity of "
        f"{np.exp(dense.mean()):.3f}. Losses are in nats per token: 0.01 is 1 % of the perplexity. "
        "± is half of the 95 % interval over windows, of what is lost in the same windows. The "
        "divergence is that of the predictions from the dense model's, which has less noise. "
        + " ".join(_MEANING[fit] for fit in fits),
        "",
        f"{origin(about)}.",
        "",
        "## Rank correlation",
        "",
        "Of what the plans of the first text are expected to lose, with what is measured and with "
        f"the divergence. *Small* are those that are expected to lose less than {_SMALL}. Measured "
        f"over expected is of plans that are expected to lose {_LEAST} or more.",
        "",
        *_correlations(first, fits),
        "",
        "## More freedom",
        "",
        "What is lost by methods or forms, and by a request that allows more; a mean over the "
        "calibration texts that have both.",
        "",
        *_freedom(plans, fits),
        "",
    ]
    if len(fits) > 1:
        lines += [
            "## The fits",
            "",
            "What is lost by the same plan of the first text.",
            "",
            *_fits(first, fits),
            "",
        ]
    return "\n".join([*lines, "## Every plan", "", *_plans(first, fits)]) + "\n"


def _plan(row: Row) -> tuple[str, float, float]:
    return row["case"], row["params"], row["cache"]


def _correlations(rows: Sequence[Row], fits: Sequence[str]) -> list[str]:
    groups: dict[str, Callable[[Row], bool]] = {
        "all": lambda row: True,
        "small": lambda row: bool(row["expected"] < _SMALL),
        "heads, any keys": lambda row: row["case"].endswith(" keys"),
    }
    names = sorted({row["case"] for row in rows})
    groups |= {name: lambda row, name=name: row["case"] == name for name in names}  # type: ignore[misc]
    cells = []
    for name, belongs in groups.items():
        for fit in fits:
            some = [row for row in rows if row["fit"] == fit and belongs(row)]
            if len(some) < _FEWEST:
                continue
            expected = [row["expected"] for row in some]
            lost = [row["lost"].mean() for row in some]
            pairs = zip(expected, lost, strict=True)
            over = sorted(real / hoped for hoped, real in pairs if hoped >= _LEAST)
            cells.append(
                [
                    name,
                    fit,
                    len(some),
                    f"{_ranked(expected, lost):.3f}",
                    f"{_ranked(expected, [row['divergence'] for row in some]):.3f}",
                    f"{statistics.median(over):.2f}" if over else None,
                    f"{over[0]:.2f} to {over[-1]:.2f}" if over else None,
                ]
            )
    columns = ["plans", "fits", "number", "measured", "divergence"]
    return table([*columns, "measured over expected, median", "range"], cells)


def _ranked(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's rank correlation."""
    return float(spearmanr(first, second).statistic)


def _freedom(rows: Sequence[Row], fits: Sequence[str]) -> list[str]:
    cells, worse, beyond = [], 0, 0
    for less, more in FREEDOMS:
        budgets = {(row["params"], row["cache"]) for row in rows if row["case"] == more}
        for params, cache in sorted(budgets, reverse=True):
            for fit in fits:
                before, after = (
                    {r["seed"]: r["lost"] for r in rows if _plan(r) == plan and r["fit"] == fit}
                    for plan in ((less, params, cache), (more, params, cache))
                )
                if not (seeds := before.keys() & after.keys()):
                    continue
                without, with_more = (_mean(each[s] for s in seeds) for each in (before, after))
                change, reach = _interval(with_more - without)
                worse, beyond = worse + (change > 0), beyond + (change > reach)
                lost = (f"{without.mean():.4f}", f"{with_more.mean():.4f}")
                cells.append([less, more, params, cache, fit, *lost, _shown(change, reach)])
    if not cells:
        return ["No pair of such plans was measured."]
    columns = ["allowed", "allowed more", "parameters", "KV", "fits", "lost", "with more", "change"]
    return [
        f"Of {len(cells)} pairs, the one that is allowed more loses more in {worse}, and in "
        f"{beyond} by more than the interval of the change.",
        "",
        *table(columns, cells),
    ]


def _fits(rows: Sequence[Row], fits: Sequence[str]) -> list[str]:
    cells = []
    for plan in sorted({_plan(row) for row in rows}):
        by_fit = {row["fit"]: row["lost"] for row in rows if _plan(row) == plan}
        if len(by_fit) > 1:
            lost = [_shown(*_interval(by_fit[f])) if f in by_fit else None for f in fits]
            cells.append([*plan, *lost])
    return table(["methods", "parameters", "KV", *fits], cells)


def _plans(rows: Sequence[Row], fits: Sequence[str]) -> list[str]:
    cells = []
    for row in sorted(rows, key=lambda row: float(row["lost"].mean())):
        if row["fit"] == fits[0]:
            lost = _shown(*_interval(row["lost"]))
            cells.append([*_plan(row), f"{row['expected']:.4f}", lost, f"{row['divergence']:.4f}"])
    columns = ["methods", "parameters", "KV", "expected", f"measured, {fits[0]}", "divergence"]
    return table(columns, cells)


def _mean(values: Iterable[NDArray[np.float64]]) -> NDArray[np.float64]:
    mean: NDArray[np.float64] = np.mean(list(values), axis=0)
    return mean


def _interval(values: NDArray[np.float64]) -> tuple[float, float]:
    """The mean of windows that are independent, and half of its 95 % interval."""
    error = values.std(ddof=1) / np.sqrt(len(values))
    return float(values.mean()), float(t.ppf(0.975, len(values) - 1) * error)


def _shown(middle: float, reach: float) -> str:
    return f"{middle:.4f} ± {reach:.4f}"

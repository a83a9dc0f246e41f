"""Whether plans lose what they are expected to, and whether more freedom ever makes them worse.

    python -m benchmarks.quality.predicted_losses OUT [--device cuda]  # predicted_losses.json, .md

Plans of many budgets and methods, each made from statistics of one part of the calibration text,
are compressed and evaluated on held-out text. The expected loss of each stands beside the measured
one. Those of the main budgets are made from other parts of the text, too, and with the fits of
earlier releases: low rank without the metric of the output, and layers that are not refitted.
A run that was stopped goes on with OUT/predicted_losses.jsonl.
"""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.json_lines import append_line, lines_of, without_a_cut_line
from benchmarks.common.markdown import table
from benchmarks.common.page import arguments, origin, provenance, save
from benchmarks.quality.trials import (
    Calibrated,
    Trial,
    calibrations,
    dense_perplexity,
    measured,
    pool_of_workers,
)
from vllm_gac import demo
from vllm_gac.checkpoint.open import open_checkpoint
from vllm_gac.compression.statistics_file import check_stats
from vllm_gac.planning.losses import MeasuredLosses, read_losses
from vllm_gac.planning.plan_file import Plan, planned_layout
from vllm_gac.planning.planner import best_plan
from vllm_gac.planning.request import PlanRequest

COMMAND = "python -m benchmarks.quality.predicted_losses OUT --device cuda"
_PARAMS = (0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.6)
_CACHES = (0.9, 0.75, 0.625, 0.5, 0.375)
# The budgets that are measured with all calibration texts.
_MAIN_PARAMS, _MAIN_CACHES = (1.0, 0.9, 0.8, 0.7), (1.0, 0.75, 0.5)
# No correlation of fewer plans is shown.
_FEWEST = 5
# How the weights are made: arguments of `compress`.
FITS: Mapping[str, Mapping[str, Any]] = {
    "now": {},
    "not refitted": {"refit": False},
    "as before": {"refit": False, "whitening": "svd-llm"},
}
# Requests where the second of two allows more than the first.
FREEDOMS = (
    ("heads,prune", "heads,prune,lowrank"),
    ("heads, rotary keys", "heads, auto keys"),
    ("heads, latent keys", "heads, auto keys"),
)


@dataclass(frozen=True)
class Case:
    """A name for methods and forms, budgets, and the request for them."""

    name: str
    params: float
    cache: float
    request: PlanRequest


def cases() -> Iterator[Case]:
    """All requests."""
    for params in _PARAMS:
        for methods in ("lowrank", "prune"):
            yield _case(methods, params, 1.0)
        for cache in (0.75, 0.5):
            yield _case("heads,prune", params, cache)
            yield _case("heads,prune,lowrank", params, cache)
        yield _case("heads,lowrank", params, 0.75)
    for cache in _CACHES:
        for form in ("rotary", "latent", "auto"):
            yield _case("heads", 1.0, cache, form)


def _case(methods: str, params: float, cache: float, form: str | None = None) -> Case:
    request = PlanRequest(param_ratio=params, kv_ratio=cache, methods=tuple(methods.split(",")))
    if form is None:
        return Case(methods, params, cache, request)
    return Case(f"{methods}, {form} keys", params, cache, replace(request, key_form=form))


def main() -> None:
    """Measure every plan with each of the fits; write the tables."""
    args = arguments(__doc__).parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    seeds = calibrations(args.out, args.device)
    expected, trials = planned(seeds)
    found = _found(args.out / "predicted_losses.jsonl", trials, args.device)
    dense = dense_perplexity(args.device)
    rows = [
        {
            "case": name,
            "params": params,
            "cache": cache,
            "seed": seed,
            "fit": fit,
            "expected": expected[name, params, cache, seed],
            "measured": math.log(perplexity / dense),
        }
        for (name, params, cache, seed, fit), perplexity in found.items()
    ]
    result = {**provenance(COMMAND, args.device, args.commit), "dense": dense, "rows": rows}
    text = page(result)
    save(args.out / "predicted_losses", result, text)
    print(text)


def _found(file: Path, trials: Sequence[Trial], device: str) -> dict[tuple[Any, ...], float]:
    """The perplexity of each trial by its name. Those in `file` are not measured again."""
    without_a_cut_line(file)
    found = {tuple(line["trial"]): line["perplexity"] for line in lines_of(file)}

    def keep(name: tuple[Any, ...], values: Mapping[str, Any]) -> None:
        found[name] = values["perplexity"]
        append_line(file, {"trial": name, "perplexity": found[name]})

    if left := [trial for trial in trials if trial.name not in found]:
        measured(left, device, keep)
    return {trial.name: found[trial.name] for trial in trials}


def planned(
    seeds: Sequence[Calibrated],
) -> tuple[dict[tuple[Any, ...], float], list[Trial]]:
    """The expected losses by case and seed, and the trials: each case with each fit.

    Plans of budgets that are not among the main ones are made by the first of the calibrations
    only, and with the present fits.
    """
    tasks = [
        (calibrated.stats, seed, case)
        for seed, calibrated in enumerate(seeds)
        for case in cases()
        if seed == 0 or _is_main(case)
    ]
    expected, trials = {}, []
    with pool_of_workers() as pool:
        plans = map(Plan.model_validate_json, pool.imap(_planned, tasks))
        for (stats, seed, case), plan in zip(tasks, plans, strict=True):
            key = (case.name, case.params, case.cache, seed)
            expected[key] = plan.expected_loss or 0.0
            layers = planned_layout(seeds[seed].model, plan).layers
            trials += [
                Trial((*key, fit), layers, stats, options)
                for fit, options in FITS.items()
                if fit == "now" or _is_main(case)
            ]
    return expected, trials


def _is_main(case: Case) -> bool:
    return case.params in _MAIN_PARAMS and case.cache in _MAIN_CACHES


def _planned(task: tuple[Path, int, Case]) -> str:
    """The best plan for a case, as JSON: what a plan is made of cannot be pickled."""
    stats, _, case = task
    return best_plan(open_checkpoint(demo.MODEL), _losses(stats), case.request).model_dump_json()


@lru_cache
def _losses(stats: Path) -> MeasuredLosses:
    model = open_checkpoint(demo.MODEL)
    metadata = check_stats(stats, model.layout, model.config_sha256)
    return read_losses(stats, model.layout, metadata)


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's rank correlation of two lists without ties."""
    ranks = [np.argsort(np.argsort(values)) for values in (first, second)]
    return float(np.corrcoef(*ranks)[0, 1])


def page(result: dict[str, Any]) -> str:
    """The tables in Markdown."""
    rows = result["rows"]
    now = [row for row in rows if row["fit"] == "now" and row["seed"] == 0]
    lines = [
        "# Expected and measured losses of plans",
        "",
        f"Demo model, dense perplexity {result['dense']:.3f}, {len(now)} plans by one calibration "
        "text, and some of them by two more. Losses are in nats per token: 0.01 is 1 % of the "
        f"perplexity. {origin(result)}.",
        "",
        *_correlations(rows),
        "",
        "## More freedom",
        "",
        "The loss by methods or forms, and by a request that allows more, mean over the "
        "calibration texts.",
        "",
        *_freedom(rows),
        "",
        "## The fits",
        "",
        "Mean measured losses over the calibration texts. *As before* is low rank by the inputs "
        "alone, and no refit.",
        "",
        *_fits(rows),
        "",
        "## Every plan",
        "",
        *_plans(now),
    ]
    return "\n".join(lines) + "\n"


def _correlations(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    cells = []
    first = [row for row in rows if row["seed"] == 0]
    for name in ("all", *sorted({row["case"] for row in first})):
        for fit in FITS:
            some = [r for r in first if r["fit"] == fit and name in ("all", r["case"])]
            pairs = [(r["expected"], r["measured"]) for r in some]
            if len(pairs) < _FEWEST:
                continue
            ratios = sorted(real / max(hoped, 1e-6) for hoped, real in pairs)
            cells.append(
                [
                    name,
                    fit,
                    len(pairs),
                    f"{rank_correlation(*zip(*pairs, strict=True)):.3f}",
                    f"{statistics.median(ratios):.2f}",
                    f"{ratios[0]:.2f} to {ratios[-1]:.2f}",
                ]
            )
    columns = ["plans", "fits", "number", "rank correlation", "measured over expected", "range"]
    return table(columns, cells)


def _mean(rows: Sequence[Mapping[str, Any]], **wanted: Any) -> float | None:
    found = [
        row["measured"] for row in rows if all(row[key] == value for key, value in wanted.items())
    ]
    return statistics.mean(found) if found else None


def _freedom(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    cells = []
    for less, more in FREEDOMS:
        budgets = {(row["params"], row["cache"]) for row in rows if row["case"] == more}
        for params, cache in sorted(budgets, reverse=True):
            for fit in FITS:
                where = {"params": params, "cache": cache, "fit": fit}
                before, after = (_mean(rows, case=name, **where) for name in (less, more))
                if before is not None and after is not None:
                    gained = f"{after - before:+.4f}"
                    numbers = (f"{before:.4f}", f"{after:.4f}", gained)
                    cells.append([less, more, params, cache, fit, *numbers])
    columns = ["allowed", "allowed more", "parameters", "KV", "fits", "loss", "with more", "change"]
    return table(columns, cells)


def _fits(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    budgets = sorted({(r["case"], r["params"], r["cache"]) for r in rows if r["seed"] == 1})
    cells = []
    for name, params, cache in budgets:
        where = {"case": name, "params": params, "cache": cache}
        losses = [_mean(rows, **where, fit=fit) or 0.0 for fit in FITS]
        cells.append([name, params, cache, *(f"{loss:.4f}" for loss in losses)])
    return table(["methods", "parameters", "KV", *FITS], cells)


def _plans(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    cells = [
        [r["case"], r["params"], r["cache"], f"{r['expected']:.4f}", f"{r['measured']:.4f}"]
        for r in sorted(rows, key=lambda r: float(r["measured"]))
    ]
    return table(["methods", "parameters", "KV", "expected", "measured"], cells)


if __name__ == "__main__":
    main()

"""The page of `python -m loadtest coverage`: each printed interval at several loads."""

import math
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from loadtest.checks.coverage import (
    TRUE_PARTS,
    Plan,
    Search,
    Tally,
    count,
    count_capacities,
    true_capacity,
    true_numbers,
    true_values,
)

# From light load to near the capacity of the slower server, which is about 8 requests/s.
_PLANS = (Plan(4.0, 4, 120.0), Plan(8.0, 4, 120.0), Plan(12.0, 4, 120.0))
_SEARCH = Search((6.0, 14.0), 120.0, 8)
_SEARCH_EACH = 4  # experiments: a search takes as long as several of them
_BATCH = 40


def write_page(out: Path, experiments: int, truth: float = 20_000.0) -> None:
    """Write the page in Markdown, and again as experiments are added. All cores simulate.

    Each part of the truth is `truth` seconds of simulated time.
    """
    began = time.monotonic()
    with ProcessPoolExecutor() as pool:
        parts = [[pool.submit(true_values, p, i, truth) for i in range(TRUE_PARTS)] for p in _PLANS]
        true = pool.submit(true_capacity, 0.3 * truth)
        columns = [true_numbers([part.result() for part in of_plan]) for of_plan in parts]
        capacity = true.result()
        for first in range(0, experiments, _BATCH):
            batch = range(first, min(first + _BATCH, experiments))
            for plan, column in zip(_PLANS, columns, strict=True):
                count(plan, batch, column, pool.map)
            searches = range(first // _SEARCH_EACH, math.ceil(batch.stop / _SEARCH_EACH))
            count_capacities(_SEARCH, searches, capacity, pool.map)
            minutes = (time.monotonic() - began) / 60
            out.write_text(_page(columns, capacity, minutes), encoding="utf-8")


def _page(columns: Sequence[dict[str, Tally]], capacity: Tally, minutes: float) -> str:
    experiments = next(iter(columns[0].values())).experiments
    lines = [
        "# Coverage of the load test's intervals",
        "",
        f"`python -m loadtest coverage OUT --experiments {experiments}`, {minutes:.0f} minutes.",
        "Each experiment is a comparison of two simulated batching servers",
        "([simulator](../../loadtest/checks/simulator.py)) with schedules of its own, and goes",
        "through the report's code. A cell is the share of experiments whose 95 % interval holds",
        "the truth, which is that of the same servers over hours, and the median half width.",
        "*open*: most intervals have no upper limit, because such runs are too short for one, and",
        "the report says so.",
        "",
        "| number | " + " | ".join(_name(plan) for plan in _PLANS) + " |",
        "| --- " + "| ---: " * len(_PLANS) + "|",
        *(_line(name, columns) for name in columns[0]),
        "",
        _between(columns),
        "What holds more or less than 95 % has three causes",
        "([intervals](../../loadtest/report/intervals.py)):",
        "",
        "- Gaps between tokens (itl, gap) are nearly a lattice: steps with and without a prompt. A",
        "  percentile has the same value for a range of levels there, so its interval holds the",
        "  truth almost always.",
        "- 99th percentiles follow from few requests. The exact interval of a small count is wider",
        "  than need be, and slow requests are taken to be at least as clustered as slowish ones,",
        "  which guards near saturation and is too much at light load.",
        "- Near saturation, rare bursts make what is slow. A run without one does not know how",
        "  slow that is, nor how wide its interval should be. Run longer, with more schedules.",
        "",
        "Capacity, by the search that `ab` does, from "
        f"{_SEARCH.rates[0]:g} and {_SEARCH.rates[1]:g}/s,",
        f"up to {_SEARCH.steps} more steps of {_SEARCH.seconds:g} s: the limits hold the true",
        f"{capacity.truth:.2f}/s in {capacity.share:.0%} of {capacity.experiments} experiments.",
        "They assume nothing of the rates between tested ones, so they hold at least as often as",
        "they say.",
    ]
    return "\n".join(lines) + "\n"


def _name(plan: Plan) -> str:
    return f"{plan.rate:g}/s, {plan.repeats} x {plan.seconds:g} s"


def _line(name: str, columns: Sequence[dict[str, Tally]]) -> str:
    return f"| {name} | " + " | ".join(_cell(column[name]) for column in columns) + " |"


def _cell(tally: Tally) -> str:
    if tally.open_ended > tally.experiments / 2:
        return f"{tally.share:.1%}, open"
    return f"{tally.share:.1%}, ±{tally.half_width:.1%}"


def _between(columns: Sequence[dict[str, Tally]]) -> str:
    limited = [
        t for column in columns for t in column.values() if t.open_ended <= t.experiments / 2
    ]
    inside = sum(0.93 <= t.share <= 0.97 for t in limited)
    below = sum(t.share < 0.93 for t in limited)
    return (
        f"Of {len(limited)} intervals with limits, {inside} cover 93 to 97 %, {below} less, and "
        f"{len(limited) - inside - below} more."
    )

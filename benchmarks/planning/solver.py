"""The knapsack solver: is its choice optimal, and how long does it take?

    python -m benchmarks.planning.solver [OUT.md]

Compares 500 random problems with HiGHS (scipy.optimize.milp). Then times problems by size, with one
budget and with two: the median of three runs on one core.
"""

import argparse
import os
import statistics
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from benchmarks.common.markdown import table
from vllm_gac.errors import PlanError
from vllm_gac.planning.knapsack import choose

CASES, REPEATS = 500, 3
SIZES = ((32, 12), (64, 24), (224, 12), (1000, 12))


def main() -> None:
    """Print the page, and write it if a file is named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, nargs="?", help="also write the page there")
    out = parser.parse_args().out
    page = _page()
    print(page)
    if out is not None:
        out.write_text(page)


def _page() -> str:
    same, infeasible = _against_highs()
    lines = [
        "# The knapsack solver",
        "",
        f"`python -m benchmarks.planning.solver`, {datetime.now(UTC).date().isoformat()}, one core "
        f"of a machine with {os.cpu_count()}. Values are concave in the dim, costs exact integers.",
        "",
        f"{CASES} random problems of 2-30 items, 2-12 candidates and 1-3 budgets against HiGHS: "
        f"the same value in {same}, both infeasible in {infeasible}.",
        "",
    ]
    rows = [
        [f"{items} x {candidates}", *(_timed(items, candidates, budgets) for budgets in (1, 2))]
        for items, candidates in SIZES
    ]
    columns = ["items x candidates", "one budget", "two"]
    return "\n".join([*lines, *table(columns, rows)]) + "\n"


def _against_highs() -> tuple[int, int]:
    random = np.random.default_rng(0)
    same = infeasible = 0
    for case in range(CASES):
        if case % 50 == 0:
            print(f"{case} of {CASES}", file=sys.stderr, flush=True)
        items, candidates = int(random.integers(2, 31)), int(random.integers(2, 13))
        costs, values = _problem(random, items, candidates, int(random.integers(1, 4)))
        limits = _limits(costs, random.uniform(0.0, 1.0))
        theirs = _highs(costs, values, limits)
        try:
            positions, gap = choose(costs, values, limits)
        except PlanError:
            assert theirs is None
            infeasible += 1
            continue
        ours = sum(v[p] for v, p in zip(values, positions, strict=True))
        assert gap == 0
        assert theirs is not None
        assert abs(ours - theirs) <= 1e-6 * abs(theirs)
        same += 1
    return same, infeasible


def _problem(
    random: np.random.Generator, items: int, candidates: int, budgets: int
) -> tuple[list[Any], list[Any]]:
    costs, values = [], []
    for _ in range(items):
        dims = np.sort(random.choice(np.arange(1, 4 * candidates), candidates, replace=False)) * 16
        unit = random.integers(100, 10_000, budgets)
        costs.append(dims[:, None] * unit[None, :])
        values.append(-random.uniform(0.01, 1) * (1 - dims / dims[-1]) ** random.uniform(1, 3))
    return costs, values


def _limits(costs: list[Any], share: float) -> dict[str, int]:
    least, most = sum(c.min(0) for c in costs), sum(c.max(0) for c in costs)
    limits = (least * 0.97 + (most - least) * share).astype(int)
    return {f"budget {k}": int(limit) for k, limit in enumerate(limits)}


def _highs(costs: list[Any], values: list[Any], limits: dict[str, int]) -> float | None:
    counts = [len(v) for v in values]
    owner = np.repeat(np.arange(len(values)), counts)
    one_each = (owner[None, :] == np.arange(len(values))[:, None]).astype(float)
    table = np.concatenate(costs).T.astype(float)
    scale = table.max(1, keepdims=True)
    within = np.array(list(limits.values()), dtype=float) / scale[:, 0]
    found = milp(
        -np.concatenate(values),
        integrality=np.ones(sum(counts)),
        bounds=Bounds(0, 1),
        constraints=[
            LinearConstraint(one_each, 1, 1),
            LinearConstraint(table / scale, -np.inf, within),
        ],
        options={"mip_rel_gap": 1e-9},
    )
    return None if found.x is None else float(-found.fun)


def _timed(items: int, candidates: int, budgets: int) -> str:
    times, gaps = [], []
    for repeat in range(REPEATS):
        random = np.random.default_rng(repeat)
        costs, values = _problem(random, items, candidates, budgets)
        limits = _limits(costs, 0.6)
        begun = time.process_time()
        _, gap = choose(costs, values, limits)
        times.append(time.process_time() - begun)
        gaps.append(gap / -sum(float(v.min()) for v in values))
    proven = "" if not max(gaps) else f", proven to {max(gaps):.1e} of the value"
    return f"{statistics.median(times):.3f} s{proven}"


if __name__ == "__main__":
    main()

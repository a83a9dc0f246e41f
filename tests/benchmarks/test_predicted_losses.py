"""The page of expected and measured losses, of made-up measurements."""

from typing import Any

from benchmarks.quality.predicted_losses import FITS, cases
from benchmarks.quality.predicted_losses_page import FREEDOMS, page

ABOUT = {"machine": "none", "date": "today", "command": "python", "commit": "0"}
DENSE = {"case": "dense", "losses": [2.0, 1.0, 3.0]}


def test_there_are_enough_plans_and_each_freedom_is_among_them() -> None:
    asked = list(cases())
    assert len(asked) >= 60
    assert len({(case.name, case.params, case.cache) for case in asked}) == len(asked)
    names = {case.name for case in asked}
    assert all(less in names and more in names for less, more in FREEDOMS)


def test_the_page_ranks_plans_and_compares_fits_and_freedoms() -> None:
    text = page([DENSE, *(row for seed in range(2) for row in _rows(seed))], ABOUT)
    assert "| lowrank | now | 7 | 1.000 | -1.000 | 1.00 | 1.00 to 1.00 |" in text
    assert "| lowrank | not refitted | 7 | 1.000 | -1.000 | 2.00 | 2.00 to 2.00 |" in text
    freed = [line for line in text.splitlines() if line.startswith("| heads,prune | heads,prune,")]
    assert len(freed) == 2 * 7 * len(FITS)
    # By windows, the change is 0.01, 0 and 0.02; 4.303 is the quantile of Student's t.
    (line,) = [line for line in freed if "| 0.8 | 0.75 | now |" in line]
    assert line.endswith(f"| 0.0100 ± {4.303 * 0.01 / 3**0.5:.4f} |")
    # Beside heads,lowrank it is 0.006 and 0.002 with the first two fits, and nothing else changes.
    assert "loses more in 56, and in 0 by more than the interval of the change." in text
    assert "## The fits" in text


def test_the_page_says_how_often_more_freedom_certainly_hurts() -> None:
    rows = [row for row in _rows(0) if row["fit"] == "now"]
    for row in rows:
        if row["case"] == "heads, auto keys":
            row["losses"] = [loss + 0.001 for loss in row["losses"]]
    text = page([DENSE, *rows], ABOUT)
    assert "Of 31 pairs, the one that is allowed more loses more in 31, and in 10 by" in text
    assert "## The fits" not in text


def test_a_page_of_few_plans_has_no_correlations() -> None:
    text = page([DENSE, *_rows(0)[:2]], ABOUT)
    assert "| all |" not in text
    assert "No pair of such plans was measured." in text


def _rows(seed: int) -> list[dict[str, Any]]:
    rows = []
    for number, case in enumerate(cases()):
        # The same of all forms of keys.
        more = case.cache / 10 if case.name.endswith("keys") else number / 1000
        expected = 0.01 + more
        for factor, fit in enumerate(FITS, 1):
            lost = [factor * expected] * 3
            if case.name == "heads,prune,lowrank":
                # `number` is one more than that of the plan that may do less.
                lost = [factor * (expected - 0.001) + x for x in (0.01, 0.0, 0.02)]
            rows.append(
                {
                    "case": case.name,
                    "params": case.params,
                    "cache": case.cache,
                    "seed": seed,
                    "fit": fit,
                    "expected": expected,
                    "losses": [x + y for x, y in zip(DENSE["losses"], lost, strict=True)],
                    "divergences": [1 / expected] * 3,
                }
            )
    return rows

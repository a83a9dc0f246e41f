"""The page of expected and measured losses, of made-up measurements."""

import math

import pytest

from benchmarks.quality.predicted_losses import FITS, FREEDOMS, cases, page, rank_correlation


def test_there_are_enough_plans_and_each_freedom_is_among_them() -> None:
    asked = list(cases())
    assert len(asked) >= 60
    assert len({(case.name, case.params, case.cache) for case in asked}) == len(asked)
    names = {case.name for case in asked}
    assert all(less in names and more in names for less, more in FREEDOMS)


def test_rank_correlation_knows_only_the_order() -> None:
    values = [0.3, 0.1, 0.7, 0.2]
    assert rank_correlation(values, [math.exp(9 * v) for v in values]) == pytest.approx(1)
    assert rank_correlation(values, [-v for v in values]) == pytest.approx(-1)


def test_the_page_compares_fits_and_freedoms() -> None:
    rows = []
    for seed in range(2):
        for number, case in enumerate(cases()):
            expected = 0.01 + number / 1000
            more = 0.005 if case.name == "heads,prune,lowrank" else 0.0
            for factor, fit in enumerate(FITS, 1):
                rows.append(
                    {
                        "case": case.name,
                        "params": case.params,
                        "cache": case.cache,
                        "seed": seed,
                        "fit": fit,
                        "expected": expected,
                        "measured": factor * expected + more,
                    }
                )
    about = {"machine": "none", "date": "today", "command": "python", "commit": "0"}
    text = page({"rows": rows, "dense": 7.0, **about})
    assert "| heads | " not in text
    assert "| lowrank | now | 7 | 1.000 | 1.00 | 1.00 to 1.00 |" in text
    assert "| lowrank | not refitted | 7 | 1.000 | 2.00 | 2.00 to 2.00 |" in text
    (line,) = [
        line
        for line in text.splitlines()
        if line.startswith("| heads,prune | heads,prune,lowrank | 0.8 | 0.75 | now |")
    ]
    assert line.count("+0.0060") == 1

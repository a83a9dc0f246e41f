"""How much starts of one server differ: from reports to deviations."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.engines.starts import MEASURES, medians, page, spreads

COLUMNS = "label,traffic,rate,measure,statistic,value,low,high,unit\n"


def report(path: Path, speeds: tuple[float, float], label: str = "gac") -> Path:
    """A report.csv whose medians at two rates are `speeds` times 10 ms, in all measures."""
    rows = [
        f"{label},chat,{rate},{measure},{statistic},{speed * scale},0,1,s\n"
        for rate, speed in zip((8, 24), speeds, strict=True)
        for measure in MEASURES
        for statistic, scale in (("p50", 0.01), ("p99", 0.05))
    ]
    path.write_text(COLUMNS + "".join(rows))
    return path


def test_what_both_rates_share_is_the_servers() -> None:
    random = np.random.default_rng(0)
    server, noise = random.normal(0, 0.05, 4000), random.normal(0, 0.02, (2, 4000))
    at = {8.0: np.exp(server + noise[0]), 24.0: np.exp(server + noise[1])}
    starts = [{(m, rate): at[rate][n] for m in MEASURES for rate in at} for n in range(4000)]
    for row in spreads(starts):
        assert row["common"] == pytest.approx(0.05, rel=0.05)
        assert row["common"] < row["common_at_most"] < 1.05 * row["common"]
        assert row["deviation"] == pytest.approx([np.hypot(0.05, 0.02)] * 2, rel=0.05)


def test_reports_become_a_page(tmp_path: Path) -> None:
    paths = [report(tmp_path / f"{n}.csv", (1 + n / 100, 2 + n / 50)) for n in range(3)]
    rows = list(spreads([medians(path) for path in paths]))
    assert [row["seconds"][1] for row in rows] == [[0.02, 0.0202, 0.0204]] * len(MEASURES)
    assert "| first token | 10.1 (1.0%) | 20.2 (1.0%) | 1.0% (at most 1.7%) |" in page(
        {"rows": rows}, 3
    )


def test_two_servers_in_one_report_are_refused(tmp_path: Path) -> None:
    one, two = (report(tmp_path / name, (1, 1), name) for name in ("a", "b"))
    both = tmp_path / "report.csv"
    both.write_text(one.read_text() + two.read_text().removeprefix(COLUMNS))
    with pytest.raises(SystemExit, match=r"report\.csv: has several servers or kinds of traffic"):
        medians(both)

"""Fixtures: runs that several test files read."""

from pathlib import Path

import pytest

from tests.loadtest.runs import write_run


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("runs")
    return [
        write_run(root / f"{label}-{rate:g}-{repeat}", label, rate, ttft * rate, itl, seed=repeat)
        for label, ttft, itl in (("dense", 0.10, 0.020), ("gac", 0.08, 0.016))
        for rate in (1.0, 3.0)
        for repeat in range(2)
    ]


@pytest.fixture
def without_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes most of a report's time."""
    monkeypatch.setattr("loadtest.report.plots._svg", lambda figure: "<svg></svg>")

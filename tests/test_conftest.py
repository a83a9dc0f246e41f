"""What the last lines of a run say."""

import subprocess
import sys
from pathlib import Path

from tests.support.imports import ROOT

SUITE = """
from pathlib import Path
import pytest

def test_that_passes(): pass

def test_that_fails_at_first():
    before = Path("ran").exists()
    Path("ran").touch()
    assert before

def test_that_fails(): assert False

@pytest.mark.needs("not_there")
def test_that_needs_a_package(): pass

def test_that_imports_a_package():
    pytest.importorskip("not_there.part")
"""


def test_flaky_tests_and_missing_packages_are_named(tmp_path: Path) -> None:
    (tmp_path / "test_suite.py").write_text(SUITE)
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-n", "2", "--reruns", "1",
         "-W", "ignore"],
        cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    lines = run.stdout.splitlines()
    assert "SKIPPED 2: needs not_there" in lines
    assert [line for line in lines if line.startswith("FLAKY")] == [
        "FLAKY: test_suite.py::test_that_fails_at_first"
    ]
    assert "1 failed, 2 passed, 2 skipped, 2 rerun" in lines[-1]
    assert run.returncode == 1

"""Tests that fail run once more, alone."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.imports import ROOT

SUITE = """
from pathlib import Path

def test_that_passes(): pass

def test_that_fails_at_first():
    before = Path("ran").exists()
    Path("ran").touch()
    assert before

def test_that_fails():
    assert not Path("broken").exists()
"""


def run_tests(directory: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tools.run_tests", "-q", "-n", "2"]
    environment = {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("is_broken", [False, True])
def test_what_passes_alone_is_flaky_and_what_fails_twice_fails(
    is_broken: bool, tmp_path: Path
) -> None:
    (tmp_path / "test_suite.py").write_text(SUITE)
    if is_broken:
        (tmp_path / "broken").touch()
    run = run_tests(tmp_path)
    *_, last = run.stdout.splitlines()
    assert last == (
        "FLAKY: failed, and passed when it ran alone: test_suite.py::test_that_fails_at_first"
    )
    assert run.returncode == is_broken
    assert "1 passed" in run.stdout


def test_a_suite_that_cannot_be_read_fails_at_once(tmp_path: Path) -> None:
    (tmp_path / "test_suite.py").write_text("not Python")
    run = run_tests(tmp_path)
    assert run.returncode == 2
    assert "FLAKY" not in run.stdout

"""The tool stops processes of the tests that it runs, continues them, and says how they ended."""

from pathlib import Path

import pytest

from tools.stress_tests import main

TESTS = """
import subprocess, sys, time, psutil

def test_a_child_is_stopped_and_continued():
    child = psutil.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    while child.status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)
    child.communicate(b"\\n")
    assert child.returncode == 0

def test_that_fails():
    assert False
"""


def test_processes_are_stopped_and_the_exit_status_is_pytests(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "test_stopped.py"
    path.write_text(TESTS)
    assert main(["--busy", "0", "-q", "-p", "no:cacheprovider", str(path)]) == 1
    assert "1 failed, 1 passed" in capfd.readouterr().out

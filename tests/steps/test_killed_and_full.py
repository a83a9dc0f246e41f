"""`kill -9` before changes to files, and a full disk: nothing is lost or half there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("verb", "step", "least"),
    [
        ("import", 6, 8),
        ("repair", 9, 8),
        pytest.param("compress", 7, 10, marks=pytest.mark.slow),
        pytest.param("heal", 11, 8, marks=pytest.mark.slow),
        pytest.param("loss", 29, 5, marks=pytest.mark.slow),
        *((verb, 0, 1) for verb in ("compress", "import", "repair", "export")),
        pytest.param("heal", 0, 1, marks=pytest.mark.slow),
    ],
)
def test_a_run_killed_anywhere_resumes_to_the_same_bytes(
    verb: str, step: int, least: int, tmp_path: Path
) -> None:
    """Step 0 is a full disk, of which the run says so in a sentence."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.steps.every_kill", tmp_path, verb, str(step)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    ended = json.loads(done.stdout)
    assert ended["wrong"] == []
    assert ended["kills"] >= least

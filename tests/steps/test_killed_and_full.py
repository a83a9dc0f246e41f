"""`kill -9` at random, and a full disk under every verb: nothing is lost, nothing is half there."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.writing_verbs import VERBS

ROOT = Path(__file__).parents[2]
OWN_MOUNTS = ("unshare", "--map-root-user", "--mount")


@pytest.mark.parametrize("rounds", [4, pytest.param(3 * len(VERBS), marks=pytest.mark.slow)])
def test_kills_lose_nothing(rounds: int, tmp_path: Path) -> None:
    found = _run("tests.steps.kill_rounds", tmp_path, rounds)
    assert found["wrong"] == []
    assert sum(found["kills"].values()) >= rounds // 2


@pytest.mark.slow
def test_a_full_disk_is_one_sentence_and_loses_nothing(tmp_path: Path) -> None:
    if subprocess.run([*OWN_MOUNTS, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this system lets nobody mount a small disk")
    found = _run("tests.steps.full_disk", tmp_path, 2, *OWN_MOUNTS)
    assert found["wrong"] == []
    assert set(found["full"]) == set(VERBS)


def _run(module: str, directory: Path, number: int, *before: str) -> Any:
    done = subprocess.run(
        [*before, sys.executable, "-m", module, directory, str(number)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)

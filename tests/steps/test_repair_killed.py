"""After a kill or a full disk, `repair --resume` writes the same bytes."""

import json
import sys
from pathlib import Path

import pytest

from tests.support.dense_models import config, write
from tests.support.killing import assert_disk_was_full, assert_resumed, run_child, survey


def test_resumes_to_the_same_bytes_wherever_it_was_killed(tmp_path: Path) -> None:
    summary = _surveyed(tmp_path, step=9)
    assert_resumed(summary, points=8)


@pytest.mark.slow
def test_resumes_to_the_same_bytes_from_every_single_point(tmp_path: Path) -> None:
    summary = _surveyed(tmp_path, step=1)
    assert_resumed(summary, points=60)


def test_a_full_disk_leaves_one_sentence_and_resumable_work(tmp_path: Path) -> None:
    summary = _surveyed(tmp_path, step=0)
    assert_disk_was_full(summary)


def _surveyed(directory: Path, step: int) -> dict[str, object]:
    write(directory / "model", config(intermediate_size=93))
    return run_child(__name__, directory, step)


def _child(directory: Path, step: int) -> dict[str, object]:
    from vllm_gac.steps.repair import repair

    def run(out: Path, resume: bool) -> None:
        repair(directory / "model", out, resume=resume, progress=False)

    return survey(directory, run, step)


if __name__ == "__main__":
    print(json.dumps(_child(Path(sys.argv[1]), int(sys.argv[2]))))

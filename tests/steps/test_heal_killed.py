"""After a kill or a full disk, `heal --resume` writes the same bytes."""

import json
import sys
from pathlib import Path

import pytest

from tests.steps.healing_models import write_all
from tests.support.killing import assert_disk_was_full, assert_resumed, run_child, survey

pytestmark = pytest.mark.slow


def test_resumes_to_the_same_bytes_wherever_it_was_killed(tmp_path: Path) -> None:
    write_all(tmp_path)
    assert_resumed(run_child(__name__, tmp_path, 11), points=8)


def test_a_full_disk_leaves_one_sentence_and_resumable_work(tmp_path: Path) -> None:
    write_all(tmp_path)
    assert_disk_was_full(run_child(__name__, tmp_path, 0))


def _child(directory: Path, step: int) -> dict[str, object]:
    from vllm_gac.healing import train
    from vllm_gac.steps.heal import heal
    from vllm_gac.steps.heal_request import HealRequest

    train._SAVING = 0  # save each time
    request = HealRequest(tokens=1792, sequence_length=32, batch_tokens=256, learning_rate=5e-3)

    def run(out: Path, resume: bool) -> None:
        heal(
            directory / "student",
            directory / "teacher",
            [directory / "text.txt"],
            out,
            request,
            resume=resume,
            progress=False,
        )

    return survey(directory, run, step)


if __name__ == "__main__":
    print(json.dumps(_child(Path(sys.argv[1]), int(sys.argv[2]))))

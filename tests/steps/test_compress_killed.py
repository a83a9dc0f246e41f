"""After a kill or a full disk, `compress --resume` writes the same bytes."""

import json
import sys
from pathlib import Path

import pytest

from tests.support.dense_models import config, write, write_text
from tests.support.killing import assert_disk_was_full, assert_resumed, run_child, survey


@pytest.mark.slow
def test_resumes_to_the_same_bytes_from_every_single_point(tmp_path: Path) -> None:
    summary = _surveyed(tmp_path, step=1)
    assert_resumed(summary, points=80)


@pytest.mark.slow
def test_models_tried_for_a_loss_end_in_the_same_bytes(tmp_path: Path) -> None:
    write_text(tmp_path / "held-out.txt", 30_000)
    summary = _surveyed(tmp_path, step=-29)
    assert_resumed(summary, points=5)


@pytest.mark.slow
def test_models_that_are_healed_for_a_loss_end_in_the_same_bytes(tmp_path: Path) -> None:
    write_text(tmp_path / "held-out.txt", 30_000)
    write_text(tmp_path / "heal.txt", 6_000)
    summary = _surveyed(tmp_path, step=-47)
    assert_resumed(summary, points=5)
    source = json.loads((tmp_path / "undisturbed" / "config.json").read_text())["gac"]["source"]
    assert source["max_loss"]["measured"]["unhealed"] > source["max_loss"]["measured"]["ratio"]


def test_a_full_disk_leaves_one_sentence_and_resumable_work(tmp_path: Path) -> None:
    summary = _surveyed(tmp_path, step=0)
    assert_disk_was_full(summary)


def _surveyed(directory: Path, step: int) -> dict[str, object]:
    write(directory / "model", config())
    write_text(directory / "text.txt")
    return run_child(__name__, directory, step)


def _child(directory: Path, step: int) -> dict[str, object]:
    from vllm_gac.healing import train
    from vllm_gac.planning.request import PlanRequest
    from vllm_gac.steps.compress import compress
    from vllm_gac.steps.compress_request import CompressRequest

    by_loss, healed = step < 0, (directory / "heal.txt").exists()
    train._SAVING = 0  # save each time

    def run(out: Path, resume: bool) -> None:
        compress(
            directory / "model",
            out,
            PlanRequest(max_loss=0.05, methods=("heads", "prune"))
            if by_loss
            else PlanRequest(param_ratio=0.8, kv_ratio=0.75),
            CompressRequest(
                heal_tokens=1024 if healed else None, max_tokens=512, sequence_length=128
            ),
            held_out=[directory / "held-out.txt"] if by_loss else (),
            heal=[directory / "heal.txt"] if healed else (),
            calibration=[directory / "text.txt"],
            resume=resume,
            progress=False,
        )

    return survey(directory, run, abs(step))


if __name__ == "__main__":
    print(json.dumps(_child(Path(sys.argv[1]), int(sys.argv[2]))))

"""After a kill or a full disk, `import --resume` writes the same bytes."""

import json
import sys
from pathlib import Path

from tests.importers.pickled_models import saved, svd_llm
from tests.support.killing import assert_disk_was_full, assert_resumed, run_child, survey


def test_resumes_to_the_same_bytes_wherever_it_was_killed(tmp_path: Path) -> None:
    saved(tmp_path, svd_llm())
    summary = run_child(__name__, tmp_path, step=6)
    assert_resumed(summary, points=8)


def test_a_full_disk_leaves_one_sentence_and_resumable_work(tmp_path: Path) -> None:
    saved(tmp_path, svd_llm())
    summary = run_child(__name__, tmp_path, step=0)
    assert_disk_was_full(summary)


def _child(directory: Path, step: int) -> dict[str, object]:
    from vllm_gac.steps.import_model import import_model

    def run(out: Path, resume: bool) -> None:
        import_model(directory / "m.pt", out, resume=resume, progress=False)

    return survey(directory, run, step)


if __name__ == "__main__":
    print(json.dumps(_child(Path(sys.argv[1]), int(sys.argv[2]))))

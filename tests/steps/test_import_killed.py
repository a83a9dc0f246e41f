"""A kill, a full disk or a second process never leave a half-written import."""

import json
import sys
from pathlib import Path

import pytest

from tests.importers.pickled_models import saved, svd_llm
from tests.support.command import error, result
from tests.support.killing import assert_disk_was_full, assert_resumed, run_child, survey


def test_resumes_to_the_same_bytes_wherever_it_was_killed(tmp_path: Path) -> None:
    saved(tmp_path, svd_llm())
    summary = run_child(__name__, tmp_path, step=6)
    assert_resumed(summary, points=8)


def test_a_full_disk_leaves_one_sentence_and_resumable_work(tmp_path: Path) -> None:
    saved(tmp_path, svd_llm())
    summary = run_child(__name__, tmp_path, step=0)
    assert_disk_was_full(summary)


def test_an_unfinished_import_is_continued_only_with_the_same_inputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from vllm_gac.checkpoint import atomic_files

    file, out = saved(tmp_path, svd_llm()), tmp_path / "out"

    def stop(path: Path, *arguments: object) -> None:
        if path.name.startswith("model-00002"):
            said = error(capsys, "import", file, out, "--resume", "--quiet")
            assert said.endswith("out.partial: another process is writing here")
            raise KeyboardInterrupt
        atomic_files.write_tensors(path, *arguments)

    from vllm_gac.cli import main

    monkeypatch.setattr("vllm_gac.checkpoint.layer_shards.write_tensors", stop)
    assert main(["import", str(file), str(out), "--quiet"]) == 130
    assert "--resume goes on from here" in capsys.readouterr().err
    monkeypatch.undo()
    assert not out.exists()
    assert "unfinished work of an earlier run" in error(capsys, "import", file, out, "--quiet")
    again = ("import", file, out, "--quiet", "--resume")
    assert "was started with --dtype float32, not float16" in error(
        capsys, *again, "--dtype", "float16"
    )
    assert result(capsys, *again)["format"] == "svd-llm"
    assert not out.with_name("out.partial").exists()


def _child(directory: Path, step: int) -> dict[str, object]:
    from vllm_gac.steps.import_model import import_model

    def run(out: Path, resume: bool) -> None:
        import_model(directory / "m.pt", out, resume=resume, progress=False)

    return survey(directory, run, step)


if __name__ == "__main__":
    print(json.dumps(_child(Path(sys.argv[1]), int(sys.argv[2]))))

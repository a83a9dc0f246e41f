"""Only the run that made OUT.partial removes it. Directories that are not ours stay untouched."""

import errno
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from tests.support.dense_models import config, write, write_text
from tests.support.hub import files_of
from vllm_gac.checkpoint.atomic_files import write_tensors
from vllm_gac.errors import CheckpointError, DiskError, PlanError
from vllm_gac.options import record_of
from vllm_gac.planning.request import PlanRequest
from vllm_gac.runs.workspace import check_output, partial_of, workspace
from vllm_gac.steps.calibrate.calibrate import calibrate
from vllm_gac.steps.calibrate.request import CalibrateRequest

RUN = {"dtype": "bfloat16"}
SHARD = "model-00001-of-00003.safetensors"


def run(
    out: Path,
    work: Callable[[Path], object] = lambda directory: None,
    *,
    command: str = "import",
    resume: bool = False,
) -> None:
    """A run like that of every command. It does `work` in its workspace."""
    with workspace(out, command, RUN, resume) as directory:
        work(directory)


def write_shard(directory: Path) -> None:
    write_tensors(directory / "model" / SHARD, {})


def fail_with(error: BaseException) -> Callable[[Path], object]:
    """Work that writes its first shard and then fails."""

    def work(directory: Path) -> None:
        write_shard(directory)
        raise error

    return work


def interrupt(out: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(out, fail_with(KeyboardInterrupt()))


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


OF_RUN = {"workspace": 2, "command": "repair", "run": {}}
THESIS = {"thesis.txt": "years"}
# Files of OUT.partial.
THEIRS: dict[str, dict[str, str]] = {
    "a file": THESIS,
    "a file beside ours": {"run.json": json.dumps(OF_RUN)} | THESIS,
    "another tool's run": {"run.json": '{"model": "dense", "rate": 2}'},
    "another release's run": {"run.json": json.dumps(OF_RUN | {"workspace": 1})},
    "a model without a run": {"model/model.safetensors": "months"},
    "a link": THESIS,
    "no directory": {"": "years"},
}


@pytest.mark.parametrize("theirs", THEIRS)
@pytest.mark.parametrize("exists", [False, True])
@pytest.mark.parametrize("resume", [False, True])
def test_files_of_others_are_left_alone(theirs: str, exists: bool, resume: bool, out: Path) -> None:
    partial = out.with_name("out.partial")
    if theirs == "a link":
        partial.symlink_to(out.with_name("elsewhere"))
    for name, contents in THEIRS[theirs].items():
        file = partial.resolve() / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(contents)
    if exists:
        out.mkdir()
    before = files_of(out.parent)
    with pytest.raises(CheckpointError) as refusal:
        run(out, resume=resume)
    assert str(out) in str(refusal.value)
    if not exists:
        assert "out.partial: " in str(refusal.value)
    assert files_of(out.parent) == before


def test_work_of_another_command_is_not_continued(out: Path) -> None:
    interrupt(out)
    with pytest.raises(CheckpointError, match=r"import.*repair"):
        run(out, command="repair", resume=True)
    run(out, resume=True)
    assert {path.name for path in out.iterdir()} == {SHARD}


def test_an_empty_directory_is_nobodys_loss(out: Path) -> None:
    out.with_name("out.partial").mkdir()
    run(out)
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_files_that_cannot_be_renamed_are_copied(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = Path.rename

    def refuse(path: Path, target: Path) -> Path:
        if path.parent.name == "out.partial":
            raise OSError(errno.EXDEV, "Invalid cross-device link")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    run(out, write_shard)
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    assert {path.name for path in out.iterdir()} == {SHARD}


@pytest.mark.parametrize(
    ("function", "error"), [("pathlib.Path.rename", errno.EXDEV), ("fcntl.flock", errno.ENOSYS)]
)
def test_a_file_system_that_cannot_take_the_output_is_refused_before_any_work(
    function: str, error: int, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(function, Mock(side_effect=OSError(error, os.strerror(error))))
        with pytest.raises(DiskError, match=str(out.parent)):
            run(out, fail_with(AssertionError("began")))
    run(out)
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_a_link_in_place_of_the_model_is_not_published(out: Path, tmp_path: Path) -> None:
    interrupt(out)
    model = out.with_name("out.partial") / "model"
    model.rename(out.with_name("elsewhere"))
    model.symlink_to(out.with_name("elsewhere"))
    with pytest.raises(CheckpointError, match="model"):
        run(out, resume=True)
    assert not out.exists()
    run(out, write_shard, resume=True)  # from the start


def test_nothing_is_left_of_a_refused_run_that_the_next_one_would_stumble_over(out: Path) -> None:
    for resume in (False, True, False):
        with pytest.raises(PlanError):
            run(out, fail_with(PlanError("no")), resume=resume)
        assert list(out.parent.iterdir()) == []


def test_statistics_are_kept_after_a_refusal(out: Path) -> None:
    def measure_and_fail(directory: Path) -> None:
        write_tensors(directory / "stats.safetensors", {})
        fail_with(PlanError("no"))(directory)

    with pytest.raises(PlanError):
        run(out, measure_and_fail)
    kept: list[Path] = []
    run(out, lambda directory: kept.extend(directory.rglob("*.safetensors")), resume=True)
    assert [path.name for path in kept] == ["stats.safetensors"]


def test_work_outlives_a_full_disk(out: Path) -> None:
    with pytest.raises(DiskError):
        run(out, fail_with(DiskError("full")))
    run(out, resume=True)
    assert {path.name for path in out.iterdir()} == {SHARD}


def test_an_output_that_appeared_meanwhile_is_not_replaced(out: Path) -> None:
    def meet(directory: Path) -> None:
        write_shard(directory)
        out.write_text("theirs")

    with pytest.raises(CheckpointError, match=f"{out}: "):
        run(out, meet)
    assert out.read_text() == "theirs"
    out.unlink()
    run(out, resume=True)
    assert {path.name for path in out.iterdir()} == {SHARD}


def test_a_link_to_nowhere_is_an_output_that_exists(out: Path) -> None:
    out.symlink_to(out.with_name("nowhere"))
    with pytest.raises(CheckpointError, match=f"{out}: "):
        run(out)


def test_a_directory_that_another_run_made_is_not_taken_for_ours(out: Path) -> None:
    interrupt(out)
    out.mkdir()
    with pytest.raises(CheckpointError, match=f"{out}: "):
        run(out, resume=True)


def test_statistics_that_were_renamed_take_their_leftovers_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = write(tmp_path / "dense", config()), [write_text(tmp_path / "text")], tmp_path / "stats"
    request = CalibrateRequest(methods=["heads"], max_tokens=256)
    with monkeypatch.context() as patch:
        patch.setattr("vllm_gac.compression.passes._KEEP_SECONDS", 0)
        patch.setattr("vllm_gac.runs.workspace._remove", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            calibrate(*given, request, progress=False)
    assert list(tmp_path.glob("stats.partial/hidden-*"))
    for _ in range(2):
        calibrate(*given, request, progress=False)
        assert {path.name for path in tmp_path.iterdir()} == {"dense", "text", "stats"}
    with pytest.raises(DiskError, match="stats: "):
        calibrate(*given, CalibrateRequest(methods=["prune"], max_tokens=256), progress=False)


def changed(run: dict[str, Any], path: str, value: object) -> dict[str, Any]:
    """`run` with another value at a path of keys."""
    key, _, rest = path.partition(".")
    return run | {key: changed(run.get(key, {}), rest, value) if rest else value}


@pytest.mark.parametrize(
    ("path", "value", "values"),
    [
        ("plan.param_ratio", 0.7, " (0.8, not 0.7)"),
        ("plan.methods", ["heads"], ""),
        ("plan.gpu", "h200", ""),
        ("model.files", {"model.safetensors": [3, 4]}, ""),
        ("max_tokens", 9, ""),
        ("offload", True, " (False, not True)"),
    ],
)
def test_work_of_another_run_is_refused_by_the_first_difference(
    path: str, value: object, values: str, out: Path
) -> None:
    begun: dict[str, Any] = {
        "offload": False,
        "model": {"files": {"model.safetensors": [1, 2]}},
        "plan": record_of(PlanRequest(param_ratio=0.8)),
        "max_tokens": None,
    }
    with pytest.raises(KeyboardInterrupt), workspace(out, "compress", begun, False):
        raise KeyboardInterrupt
    name = "model.files.model.safetensors" if path == "model.files" else path
    with (
        pytest.raises(CheckpointError, match=re.escape(f"{name}{values};")),
        workspace(out, "compress", changed(begun, path, value), True),
    ):
        pass
    with workspace(out, "compress", begun | {"other": None}, True):
        pass
    assert out.exists()


def test_no_input_lies_in_the_workspace(out: Path, tmp_path: Path) -> None:
    partial = partial_of(out)
    (partial / "model").mkdir(parents=True)
    (tmp_path / "stats").symlink_to(partial / "stats.safetensors")
    for path in (partial / "model", tmp_path / "stats"):
        with pytest.raises(CheckpointError, match=re.escape(f"{path}: ")):
            check_output(out, inputs=[tmp_path / "fine", path])
    (partial / "model").rmdir()
    check_output(out, inputs=[tmp_path / "fine"])

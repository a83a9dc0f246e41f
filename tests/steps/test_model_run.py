"""The frame of a run that writes a model: its record, its threads, and when the output appears."""

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from tests.support.model_files import config, write_model
from vllm_gac.checkpoint.locate import INDEX_FILE
from vllm_gac.errors import CheckpointError, DiskError
from vllm_gac.steps.model_run import Output, threads_of
from vllm_gac.version import version

RECORD = {"strategy": "minimal"}


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def output(directory: Path, resume: bool = False, is_ours: bool = True) -> Output:
    return Output(directory / "out", "repair", [], resume, is_ours=is_ours)


def refused(directory: Path, named: str, record: dict[str, str], resume: bool = True) -> None:
    with pytest.raises((CheckpointError, DiskError), match=named):
        output(directory, resume).run(record).__enter__()


def test_the_output_appears_when_it_is_complete(tmp_path: Path) -> None:
    with output(tmp_path).run(RECORD) as run:
        write_model(run.model, config())
        assert not (tmp_path / "out").exists()
    assert not run.finished
    assert (tmp_path / "out" / INDEX_FILE).is_file()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_name_that_is_not_utf8_is_refused_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="--out"):
        output(tmp_path / "\udcff").check()
    assert not list(tmp_path.iterdir())


def test_a_resumed_run_has_its_record_and_its_threads(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    with pytest.raises(KeyboardInterrupt), output(tmp_path).run(RECORD) as run:
        raise KeyboardInterrupt
    record = json.loads((run.work / "run.json").read_text())["run"]
    assert (record["threads"], record["torch_version"]) == (1, torch.__version__)
    torch.set_num_threads(2)
    refused(tmp_path, "strategy", {"strategy": "none"})
    with output(tmp_path, resume=True).run(RECORD) as run:
        assert torch.get_num_threads() == 1
        write_model(run.model, config())
    assert torch.get_num_threads() == 2


def test_work_of_another_version_is_refused_with_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(KeyboardInterrupt), output(tmp_path).run(RECORD):
        raise KeyboardInterrupt
    monkeypatch.setattr("vllm_gac.steps.model_run.version", lambda: "other")
    refused(tmp_path, rf"{re.escape(version())}.*\bother\b", RECORD)


@pytest.mark.parametrize("resume", [False, True])
def test_two_runs_at_once_and_one_that_was_forgotten_are_refused(
    resume: bool, tmp_path: Path
) -> None:
    def two() -> None:
        with output(tmp_path).run(RECORD):
            with pytest.raises(CheckpointError, match=r"out\.partial"):
                output(tmp_path, resume).check()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        two()
    with pytest.raises(CheckpointError, match="--resume"):
        output(tmp_path).check()


@pytest.mark.parametrize("stopped", [False, True])
def test_a_run_that_is_done_or_was_stopped_in_its_last_moment_is_finished(
    stopped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
        if stopped:
            patch.setattr("vllm_gac.runs.workspace._remove", Mock(side_effect=KeyboardInterrupt))
        with output(tmp_path).run(RECORD) as run:
            write_model(run.model, config())
    assert (tmp_path / "out.partial").exists() == stopped
    for _ in range(2):
        output(tmp_path, resume=True).check()
        with output(tmp_path, resume=True).run(RECORD) as run:
            assert (run.finished, run.model) == (True, tmp_path / "out")
        assert [path.name for path in tmp_path.iterdir()] == ["out"]
    for resume, other in ((False, RECORD), (True, {"strategy": "none"})):
        refused(tmp_path, f"{tmp_path / 'out'}: ", other, resume)


def test_a_process_that_does_not_write_leaves_nothing(tmp_path: Path) -> None:
    other = output(tmp_path, is_ours=False)
    other.check()
    with other.run(RECORD) as run:
        assert run.work == tmp_path / "out.partial"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("recorded", "expected"),
    [(3, 3), (0, None), (10**9, None), (True, None), ("3", None), (None, None)],
)
def test_only_a_number_of_threads_that_a_machine_can_have_is_taken(
    recorded: object, expected: int | None, tmp_path: Path
) -> None:
    partial = tmp_path / "out.partial"
    partial.mkdir()
    record = {"workspace": 2, "command": "heal", "run": {"threads": recorded}}
    (partial / "run.json").write_text(json.dumps(record))
    assert threads_of(tmp_path / "out") == (expected or torch.get_num_threads())

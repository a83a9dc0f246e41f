"""--overwrite keeps the old result until the new one is complete, and replaces nothing else."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import dense_models
from tests.support.command import error, result
from tests.support.model_files import config, gac_config, write_model
from vllm_gac.errors import CheckpointError, DiskError
from vllm_gac.runs.workspace import check_output, finished_before, partial_of, workspace
from vllm_gac.runs.written import check_replaceable, remove_written

OLD = "old"


def write(out: Path, contents: str, *, resume: bool = False) -> None:
    """A run that writes one file, and reads the old one until it ends."""
    with workspace(out, "compress", {"contents": contents}, resume, True) as directory:
        if out.exists():
            assert (out / "README.md").read_text() == OLD
        (directory / "model" / "README.md").write_text(contents)
        (directory / "model" / "model.safetensors").touch()
        (directory / "model" / "config.json").write_text('{"gac": {}}')


@pytest.fixture
def out(tmp_path: Path) -> Path:
    write(tmp_path / "out", "old")
    return tmp_path / "out"


def contents(out: Path) -> str:
    assert not partial_of(out).exists()
    return (out / "README.md").read_text()


def test_the_new_one_takes_the_place_of_the_old_one(out: Path) -> None:
    write(out, "new")
    assert contents(out) == "new"


def test_a_run_that_is_refused_leaves_the_old_one(out: Path) -> None:
    with (
        pytest.raises(CheckpointError, match="NaN"),
        workspace(out, "compress", {}, False, True),
    ):
        raise CheckpointError("NaN")
    assert contents(out) == "old"


def write_stopped_at_rename(number: int, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first rename takes the old one away, the second puts the new one in its place."""
    count, plain = 0, Path.rename

    def stopping(path: Path, target: Path) -> Path:
        nonlocal count
        count += target == out or path == out
        if count == number:
            raise KeyboardInterrupt
        return plain(path, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", stopping)
        with pytest.raises(KeyboardInterrupt):
            write(out, "new")


@pytest.mark.parametrize("rename", [1, 2])
def test_a_run_stopped_at_the_end_is_resumed(
    out: Path, rename: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_stopped_at_rename(rename, out, monkeypatch)
    both = [path.read_text() for path in partial_of(out).rglob("README.md")]
    assert both == ["new"] if rename == 1 else sorted(both) == ["new", "old"]
    assert out.exists() == (rename == 1)
    assert not finished_before(out, "compress", {"contents": "new"})
    # Whoever comes next, what was the only copy is in its place again, and is not to be removed.
    with pytest.raises(CheckpointError, match="unfinished work"):
        write(out, "newer")
    assert (out / "README.md").read_text() == "old"
    write(out, "new", resume=True)
    assert contents(out) == "new"


def test_what_appeared_at_the_old_ones_place_is_not_replaced_by_it(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_stopped_at_rename(2, out, monkeypatch)
    write_model(out, gac_config())
    for resume in (False, True):
        with pytest.raises(CheckpointError, match=r"replaced: was at .* move one of the two away"):
            write(out, "new", resume=resume)
    shutil.rmtree(out)
    write(out, "new", resume=True)
    assert contents(out) == "new"


def test_a_run_stopped_while_the_old_one_is_removed_is_done(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Path.unlink

    def stopped(path: Path, missing_ok: bool = False) -> None:
        plain(path, missing_ok)
        if path.parent.name == "replaced":
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", stopped)
        with pytest.raises(KeyboardInterrupt):
            write(out, "new")
    assert finished_before(out, "compress", {"contents": "new"})
    assert contents(out) == "new"


def test_a_stopped_removal_is_finished_by_any_run(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(directory: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("vllm_gac.runs.workspace.remove_written", stopped)
        with pytest.raises(KeyboardInterrupt):
            write(out, "new")
    assert partial_of(out).exists()
    monkeypatch.setattr("tests.cli.test_overwrite.OLD", "new")
    write(out, "newer")
    assert contents(out) == "newer"


def a_note(out: Path) -> None:
    (out / "notes.txt").write_text("years")


def statistics(out: Path) -> None:
    (out / "stats.safetensors").write_text("hours")


def a_tokenizers_notes(out: Path) -> None:
    (out / "tokenizer_notes.txt").write_text("years")


def an_edit(out: Path) -> None:
    (out / "README.md").write_text("edited")


def an_edit_of_the_same_size_and_time(out: Path) -> None:
    before = (out / "README.md").stat()
    (out / "README.md").write_text("OLD")
    os.utime(out / "README.md", ns=(before.st_atime_ns, before.st_mtime_ns))


def a_folder(out: Path) -> None:
    (out / "tokenizer").mkdir()


def a_link(out: Path) -> None:
    (out / "README.md").rename(out.with_name("card"))
    (out / "README.md").symlink_to(out.with_name("card"))


def no_record(out: Path) -> None:
    (out / "vllm-gac.json").unlink()


def another_record(out: Path) -> None:
    (out / "vllm-gac.json").write_text('{"sha256": 1}')


def no_json(out: Path) -> None:
    (out / "vllm-gac.json").write_text("{")


STRANGE: dict[Callable[[Path], None], str] = {
    a_note: "out: notes.txt: not known to be written by vllm-gac; --overwrite would remove it",
    statistics: "out: stats.safetensors: not known to be written",
    a_tokenizers_notes: "out: tokenizer_notes.txt: not known to be written",
    an_edit: "out: README.md: changed since vllm-gac wrote it",
    an_edit_of_the_same_size_and_time: "out: README.md: changed since vllm-gac wrote it",
    a_folder: "out: tokenizer: not known to be written",
    a_link: "out: README.md: not known to be written",
    no_record: r"out: README.md, config.json, model.safetensors: .* \(no vllm-gac.json says so",
    another_record: "README.md, config.json, model.safetensors, vllm-gac.json: not known",
    no_json: "vllm-gac.json: not valid JSON",
}


@pytest.mark.parametrize("change", STRANGE)
@pytest.mark.parametrize("meanwhile", [False, True])
def test_what_vllm_gac_did_not_write_is_not_removed(
    change: Callable[[Path], None], meanwhile: bool, out: Path
) -> None:
    def changed_meanwhile() -> None:
        with workspace(out, "compress", {}, False, True):
            change(out)

    if not meanwhile:
        change(out)
    with pytest.raises(DiskError, match=STRANGE[change]):
        changed_meanwhile() if meanwhile else write(out, "new")
    before = snapshot(out)
    with pytest.raises(DiskError, match=STRANGE[change]):
        remove_written(out)
    assert snapshot(out) == before


def snapshot(out: Path) -> dict[str, bytes | None]:
    return {path.name: path.read_bytes() if path.is_file() else None for path in out.iterdir()}


def test_what_came_into_the_old_one_at_the_last_moment_is_kept(
    out: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def late(directory: Path) -> None:
        a_note(directory)
        remove_written(directory)

    monkeypatch.setattr("vllm_gac.runs.workspace.remove_written", late)
    write(out, "new")
    kept = partial_of(out) / "replaced"
    assert (out / "README.md").read_text() == "new"
    assert (kept / "notes.txt").read_text() == "years"
    assert f"kept, see {kept}" in caplog.text
    with pytest.raises(CheckpointError, match="work in progress would be kept there"):
        write(out, "newer")


def test_what_is_no_directory_of_a_model_is_not_replaced(tmp_path: Path) -> None:
    check_replaceable(tmp_path / "nothing")
    (tmp_path / "link").symlink_to(write_model(tmp_path / "gac", gac_config()))
    (tmp_path / "file").touch()
    for path, said in (
        (tmp_path / "link", "is not a model directory"),
        (tmp_path / "file", "is not a model directory"),
        (write_model(tmp_path / "dense", config()), "not known to be written by vllm-gac"),
    ):
        with pytest.raises(DiskError, match=said):
            check_replaceable(path)
        assert path.exists()


def test_no_input_lies_where_files_are_removed(out: Path, tmp_path: Path) -> None:
    (tmp_path / "stats").symlink_to(out / "README.md")
    (tmp_path / "folder").symlink_to(out)
    (partial_of(out) / "model").mkdir(parents=True)
    inputs = (
        out,
        out / "README.md",
        out / "deep" / "model",
        tmp_path / "stats",
        tmp_path / "folder" / "README.md",
        partial_of(out) / "model",
    )
    for path in inputs:
        with pytest.raises(CheckpointError, match="cannot be an input, too") as refusal:
            check_output(out, False, True, [tmp_path / "fine", path])
        assert str(refusal.value).startswith(f"{path}: ")
    partial_of(out).joinpath("model").rmdir()
    check_output(out, False, True, [tmp_path, tmp_path / "out2", tmp_path / "stats2"])


def test_the_verbs_have_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dense = dense_models.write(tmp_path / "dense", dense_models.config())
    text, out, plan = dense_models.write_text(tmp_path / "text"), tmp_path / "out", tmp_path / "p"
    for ratio in (0.75, 0.5):
        plan_args = ("plan", dense, "--kv-ratio", ratio, "--method", "heads", "--out", plan)
        result(capsys, *plan_args, "--overwrite")
        args = ("compress", dense, "--out", out, "--plan", plan, "--calibration", text, "--quiet")
        made = result(capsys, *args, "--max-tokens", 512, "--sequence-length", 64, "--overwrite")
        share = made["kv_bytes_per_token"] / made["dense_kv_bytes_per_token"]
        assert share <= ratio
        assert json.loads((out / "plan.json").read_text())["kv_ratio"] == ratio
    assert "exists" in error(capsys, *args)
    assert "exists" in error(capsys, *plan_args)
    drawn, stranger = tmp_path / "plan.svg", tmp_path / "stranger.svg"
    for _ in range(2):
        result(capsys, *plan_args, "--plot", drawn, "--overwrite")
    stranger.write_text(drawn.read_text().partition("-->")[2])
    for option, kept, what in (
        ("--out", dense / "config.json", "plan"),
        ("--out", dense / "model.safetensors", "plan"),
        ("--out", text, "plan"),
        ("--plot", stranger, "picture of a plan"),
    ):
        before = kept.read_bytes()
        said = error(capsys, *plan_args[:-2], option, kept, "--overwrite")
        assert said == f"{kept}: is no {what} of vllm-gac; --overwrite replaces nothing else"
        assert kept.read_bytes() == before
    for _ in range(2):
        result(capsys, "repair", out, "--out", tmp_path / "repaired", "--quiet", "--overwrite")
    over = ("--out", out, "--quiet", "--overwrite")
    healed, other = tmp_path / "repaired", dense / "config.json"
    text, plan = text.rename(out / "t.txt"), plan.rename(out / "p.json")
    for args in (
        ("repair", out),
        ("compress", dense, "--stats", out / "s", "--param-ratio", 0.9),
        ("compress", dense, "--calibration", text, "--param-ratio", 0.9),
        ("compress", dense, "--plan", plan),
        ("heal", out, "--teacher", dense, "--text", other),
        ("heal", healed, "--teacher", out, "--text", other),
        ("heal", healed, "--teacher", dense, "--text", text),
        ("heal", healed, "--teacher", dense, "--text", other, "--held-out", text),
    ):
        assert "so it cannot be an input, too" in error(capsys, *args, *over)
    for args in (("import", out, out), ("import", dense, out, "--base", out)):
        said = error(capsys, *args, "--quiet", "--overwrite")
        assert "so it cannot be an input, too" in said
    assert text.exists()
    assert plan.exists()

"""--overwrite keeps the old result until the new one is complete, and replaces nothing else."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support import dense_models
from tests.support.command import error, result
from tests.support.model_files import config, gac_config, write_model
from vllm_gac.checkpoint.replaceable import check_replaceable
from vllm_gac.checkpoint.workspace import finished_before, partial_of, workspace
from vllm_gac.errors import CheckpointError, GacError


def write(out: Path, contents: str, *, resume: bool = False) -> None:
    """A run that writes one file, and reads the old one until it ends."""
    with workspace(out, "compress", {"contents": contents}, resume, True) as directory:
        if out.exists():
            assert (out / "README.md").read_text() == "old"
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


@pytest.mark.parametrize("rename", [1, 2])
def test_a_run_stopped_at_the_end_is_resumed(
    out: Path, rename: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    count, plain = 0, Path.rename

    def stopping(path: Path, target: Path) -> Path:
        nonlocal count
        count += target == out or path == out
        if count == rename:
            raise KeyboardInterrupt
        return plain(path, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", stopping)
        with pytest.raises(KeyboardInterrupt):
            write(out, "new")
    both = [path.read_text() for path in partial_of(out).rglob("README.md")]
    assert both == ["new"] if rename == 1 else sorted(both) == ["new", "old"]
    assert out.exists() == (rename == 1)
    assert not finished_before(out, "compress", {"contents": "new"})
    write(out, "new", resume=True)
    assert contents(out) == "new"


def test_a_run_stopped_while_the_old_one_is_removed_is_done(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(path: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("vllm_gac.checkpoint.workspace.shutil", SimpleNamespace(rmtree=stopped))
        with pytest.raises(KeyboardInterrupt):
            write(out, "new")
    assert finished_before(out, "compress", {"contents": "new"})
    assert contents(out) == "new"


def test_only_what_vllm_gac_wrote_is_replaced(tmp_path: Path) -> None:
    gac = write_model(tmp_path / "gac", gac_config())
    check_replaceable(gac)
    check_replaceable(tmp_path / "nothing")
    (tmp_path / "link").symlink_to(gac)
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    noted = write_model(tmp_path / "noted", gac_config())
    (noted / "notes.txt").touch()
    nested = write_model(tmp_path / "nested", gac_config())
    (nested / "tokenizer").mkdir()
    for path, said in (
        (tmp_path / "link", "is not a model directory"),
        (tmp_path / "file", "is not a model directory"),
        (tmp_path / "empty", "holds no model that vllm-gac wrote"),
        (write_model(tmp_path / "dense", config()), "holds no model that vllm-gac wrote"),
        (noted, "notes.txt: vllm-gac did not write this"),
        (nested, "tokenizer: vllm-gac did not write this"),
    ):
        with pytest.raises(GacError, match=said):
            check_replaceable(path)
        assert path.exists()


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
    for _ in range(2):
        result(capsys, "repair", out, "--out", tmp_path / "repaired", "--quiet", "--overwrite")
    said = error(capsys, "repair", out, "--out", out, "--quiet", "--overwrite")
    assert said == f"{out}: is the model to be repaired; --overwrite replaces only other models"

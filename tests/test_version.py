"""The version moves with the code."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import vllm_gac.version
from vllm_gac.version import NEXT


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Sources with a package of one module."""
    (tmp_path / "vllm_gac").mkdir()
    shutil.copy(vllm_gac.version.__file__, tmp_path / "vllm_gac")
    (tmp_path / "vllm_gac/__init__.py").touch()
    (tmp_path / "pyproject.toml").touch()
    return tmp_path


def version_of(tree: Path) -> str:
    code = "from vllm_gac.version import version; print(version())"
    run = subprocess.run(
        [sys.executable, "-P", "-c", code], env={"PYTHONPATH": str(tree)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    return run.stdout.strip()


def git(tree: Path, *arguments: str) -> str:
    command = ["git", "-C", tree, "-c", "user.name=a", "-c", "user.email=a", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_a_checkout_has_its_commit_and_a_digest_if_its_package_was_changed(tree: Path) -> None:
    git(tree, "init")
    git(tree, "add", ".")
    git(tree, "commit", "-m", "a")
    clean = version_of(tree)
    assert clean == f"{NEXT}+g{git(tree, 'rev-parse', 'HEAD')[:12]}"
    (tree / "pyproject.toml").write_text("# no code")
    assert version_of(tree) == clean
    (tree / "vllm_gac/__init__.py").write_text("a = 1")
    changed = version_of(tree)
    assert changed.startswith(f"{clean}.d")
    (tree / "vllm_gac/__init__.py").write_text("a = 2")
    assert version_of(tree) not in (clean, changed)
    git(tree, "commit", "-a", "-m", "b")
    assert version_of(tree) == f"{NEXT}+g{git(tree, 'rev-parse', 'HEAD')[:12]}" != clean


@pytest.mark.parametrize("git_file", [None, "gitdir: /not/there"])
def test_sources_without_git_have_a_digest(tree: Path, git_file: str | None) -> None:
    if git_file is not None:
        (tree / ".git").write_text(git_file)
    before = version_of(tree)
    assert before.startswith(f"{NEXT}+d")
    (tree / "vllm_gac/more.py").touch()
    assert version_of(tree) != before

"""Folders of benchmarks import benchmarks/common, and no other folder of benchmarks."""

import ast
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
FOLDERS = sorted(path.parent.name for path in BENCHMARKS.glob("*/__init__.py"))


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_imports_itself_and_common(folder: str) -> None:
    imported = {
        module.split(".")[1]
        for path in (BENCHMARKS / folder).rglob("*.py")
        for module in _modules(ast.parse(path.read_text()))
        if module.startswith("benchmarks.")
    }
    assert imported <= {folder, "common"}


def _modules(tree: ast.Module) -> list[str]:
    """The modules that a file imports; `from benchmarks import x` counts as benchmarks.x."""
    modules = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "benchmarks":
            modules += [f"benchmarks.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules.append(node.module or "")
    return modules

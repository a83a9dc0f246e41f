"""Folders of benchmarks import benchmarks/common, and no other folder of benchmarks."""

import pytest

from tests.support.imports import ROOT, imports, modules

FOLDERS = sorted(path.parent.name for path in (ROOT / "benchmarks").glob("*/__init__.py"))


@pytest.mark.parametrize("folder", FOLDERS)
def test_a_folder_imports_itself_and_common(folder: str) -> None:
    imported = {
        module.split(".")[1]
        for path in modules(f"benchmarks/{folder}").values()
        for module in imports(path)
        if module.startswith("benchmarks.")
    }
    assert imported <= {folder, "common"}

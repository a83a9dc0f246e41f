"""Imports point down, in the order of docs/architecture.md, and there is no circle anywhere."""

import ast
from graphlib import TopologicalSorter

import pytest

from tests.support.imports import ROOT, imports, modules

# By package of vllm_gac, top-down: the packages that it may import. Each may also import errors.
ALLOWED = {
    "cli": "steps profiling planning gpu texts checkpoint layout options",
    "steps": "planning alignment healing compression importers gpu runs texts checkpoint layout "
    "options demo",
    "profiling": "serving kernels gpu layout",
    "serving": "alignment kernels gpu checkpoint layout",
    "planning": "alignment compression gpu checkpoint layout options",
    "alignment": "gpu layout",
    "healing": "compression kernels checkpoint layout",
    "compression": "kernels texts checkpoint layout",
    "importers": "checkpoint layout",
    "gpu": "kernels checkpoint layout",
    "kernels": "layout",
    "runs": "checkpoint",
    "texts": "checkpoint",
    "checkpoint": "layout",
    "layout": "",
    "options": "",
    "demo": "",
    "errors": "",
}
# The same within these packages, by folder. The modules of steps beside its folders import none.
WITHIN = {
    "serving": {
        "model": "attention loading",
        "attention": "config",
        "config": "loading",
        "loading": "",
    },
    "steps": {
        "compress": "max_loss calibrate evaluate",
        "max_loss": "evaluate",
        "heal": "calibrate",
        "generate": "calibrate",
        "calibrate": "",
        "evaluate": "",
        "repair": "",
        "convert": "",
    },
}
# What imports vLLM. The packages below serving must work without it.
VLLM = (
    *("vllm_gac.serving", "vllm_gac.profiling.stock_kernels"),
    "vllm_gac.steps.in_process_engine",
)
# Private names of other libraries: a metric that exists already, and an operator of torch.
OF_OTHERS = {"_names_to_collectors", "_efficient_attention_forward"}


OURS = {name: path for top in ("vllm_gac", "loadtest") for name, path in modules(top).items()}


def part(name: str, depth: int) -> str:
    """The component of a dotted name at `depth`; empty if it has none."""
    parts = name.split(".")
    return parts[depth] if len(parts) > depth else ""


@pytest.mark.parametrize("package", ALLOWED)
def test_packages_import_only_what_is_below_them(package: str) -> None:
    allowed = {package, "errors", *ALLOWED[package].split()}
    for name, path in OURS.items():
        if f"{name}.".startswith(f"vllm_gac.{package}."):
            imported = {part(other, 1) for other in imports(path) if other.startswith("vllm_gac.")}
            assert imported & ALLOWED.keys() <= allowed, path


@pytest.mark.parametrize("package", WITHIN)
def test_folders_too(package: str) -> None:
    top, folders = f"vllm_gac.{package}.", WITHIN[package]
    there = {path.parent.name for path in (ROOT / "vllm_gac" / package).glob("*/*.py")}
    assert there == folders.keys()
    for name, path in OURS.items():
        if not name.startswith(top):
            continue
        below = {part(other, 2) for other in imports(path) if other.startswith(top)}
        folder = part(name, 2)
        if folder in folders:
            assert below & folders.keys() <= {folder, *folders[folder].split()}, path
        elif package == "steps":
            assert not below & folders.keys(), path


def test_every_package_is_in_the_table() -> None:
    packages = {part(name, 1) for name in OURS if name.startswith("vllm_gac.")}
    assert {name for name in packages if (ROOT / "vllm_gac" / name).is_dir()} == ALLOWED.keys()


def test_no_module_imports_itself_by_way_of_others() -> None:
    graph = {name: set(imports(path)) & OURS.keys() - {name} for name, path in OURS.items()}
    del graph["vllm_gac"]  # names the public API for type checkers, and imports none of it itself
    TopologicalSorter(graph).prepare()  # raises CycleError


def test_layout_asks_nothing_of_a_file_system() -> None:
    of_files = {"exists", "glob", "is_dir", "is_file", "iterdir", "open", "rglob", "stat"}
    for name, path in modules("vllm_gac/layout").items():
        for node in ast.walk(ast.parse(path.read_text())):
            called = node.func if isinstance(node, ast.Call) else None
            called_name = called.attr if isinstance(called, ast.Attribute) else ""
            called_name = called.id if isinstance(called, ast.Name) else called_name
            assert called_name not in of_files, name
            assert not called_name.startswith(("read_", "write_")), (name, called_name)


def test_only_what_serves_and_measures_imports_vllm() -> None:
    for name, path in OURS.items():
        if not name.startswith(VLLM):
            assert not any(part(other, 0) == "vllm" for other in imports(path)), path


def test_a_folder_of_benchmarks_imports_itself_and_common() -> None:
    for name, path in modules("benchmarks").items():
        imported = {part(other, 1) for other in imports(path) if other.startswith("benchmarks.")}
        assert imported <= {part(name, 1), "common"}, path


def test_private_names_of_vllm_are_in_one_file() -> None:
    for name, path in OURS.items():
        if name == "vllm_gac.serving.vllm_internals":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and part(node.module or "", 0) == "vllm":
                assert not any(alias.name.startswith("_") for alias in node.names), path
            if isinstance(node, ast.Attribute) and name.startswith(VLLM):
                private = node.attr.startswith("_") and not node.attr.startswith("__")
                owner = node.value.id if isinstance(node.value, ast.Name) else ""
                assert not private or owner in {"self", "cls"} or node.attr in OF_OTHERS, path

"""The pages say what the code does: the format, the paths they name, the links between them."""

import ast
import importlib
import json
import re
import runpy
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

import vllm_gac.cli
from tests.cli.test_main import VERBS
from tests.test_import_rules import ALLOWED
from vllm_gac.layout.dims import layout_of
from vllm_gac.layout.schema import GacSection, KeySection, LayerSection, ValueSection

ROOT = Path(__file__).parents[1]
FORMAT = (ROOT / "docs/format.md").read_text()
FOLDERS = ("benchmarks", "examples", "loadtest", "patches", "serving_configs")
# Result pages keep the commands and paths that they were made by, so only their links are checked.
LINKED = sorted(
    path.relative_to(ROOT).as_posix()
    for place in (".", "docs", *FOLDERS)
    for path in (ROOT / place).glob("*.md" if place in (".", "docs") else "**/*.md")
)
# The changelog also names what is gone.
RUN = [page for page in LINKED if page != "CHANGELOG.md"]
WRITTEN = [page for page in LINKED if re.match(r"(docs/|README|CONTRIBUTING|SECURITY)", page)]
SECTIONS: dict[str, type[BaseModel]] = {
    "": GacSection,
    "layers[].": LayerSection,
    "layers[].key.": KeySection,
    "layers[].value.": ValueSection,
}


def test_every_key_of_the_gac_object_is_described_and_no_other() -> None:
    keys = {prefix + name for prefix, model in SECTIONS.items() for name in model.model_fields}
    table = FORMAT.partition("## The `gac` object")[2].partition("\n## ")[0]
    assert set(re.findall(r"^\| `([\w.\[\]]+)` \|", table, re.MULTILINE)) == keys


def test_the_tensors_of_the_example_are_those_of_its_layout() -> None:
    assert _tensors(_block("text", "Its tensors:")) == layout_of(example()).tensors()


def test_the_biases_of_the_example_are_those_of_its_layout() -> None:
    plain = layout_of(example()).tensors()
    biased = layout_of(example() | {"attention_bias": True, "mlp_bias": True}).tensors()
    added = {name: shape for name, shape in biased.items() if name not in plain}
    on_page = _tensors(_block("text", "With `attention_bias` and `mlp_bias`"))
    assert on_page == {name: shape for name, shape in added.items() if ".layers.1." in name}


def test_the_example_says_the_head_dim_that_we_would_write() -> None:
    assert example()["head_dim"] == layout_of(example()).cache_head_dim


@pytest.mark.parametrize("page", LINKED)
def test_links_lead_to_files_and_headings(page: str) -> None:
    broken = [target for target in _links(ROOT / page) if not _leads_somewhere(ROOT / page, target)]
    assert not broken


@pytest.mark.parametrize("page", WRITTEN)
def test_files_and_names_in_code_are_there(page: str) -> None:
    missing = [named for named in _named(ROOT / page) if not _is_there(*named)]
    assert not missing


@pytest.mark.parametrize("page", WRITTEN)
def test_make_targets_are_in_the_makefile(page: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    extras = re.search(r"^EXTRAS := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert extras is not None
    targets |= {f"install-{extra}" for extra in extras[1].split()}
    code = re.findall(r"`make ([a-z-]+)|^make ([a-z-]+)", _text(ROOT / page), re.MULTILINE)
    assert {first or second for first, second in code} <= targets


@pytest.mark.parametrize("page", RUN)
def test_commands_are_modules_that_run(page: str) -> None:
    modules = re.findall(
        r"python3? -m ((?:benchmarks|loadtest|tools|tests)\b(?!\.`)(?:\.\w+)*)",
        _text(ROOT / page),
    )
    paths = [ROOT / module.replace(".", "/") for module in modules]
    runs = [path / "__main__.py" if path.is_dir() else path.with_suffix(".py") for path in paths]
    assert not [path for path in runs if not path.is_file()]


@pytest.mark.parametrize("page", RUN)
def test_commands_have_the_options_that_they_name(page: str) -> None:
    for command in _commands(ROOT / page):
        vllm_gac.cli.parser().parse_args(command[1:])


def test_the_page_of_the_benchmarks_names_commands_that_run() -> None:
    page = _text(ROOT / "benchmarks/README.md")
    names = re.findall(r"^\| `([\w.*]+)[^`]*` \|", page.partition("| `python -m")[2], re.MULTILINE)
    assert names
    for name in names:
        path = ROOT / "benchmarks" / name.removesuffix(".*").replace(".", "/")
        assert path.is_dir() or path.with_suffix(".py").is_file(), name


def test_the_page_of_the_command_line_has_every_verb() -> None:
    page: str = runpy.run_path(str(ROOT / "docs/command_line.py"))["command_line_page"]()
    assert set(re.findall(r"^## vllm-gac (\w+)$", page, re.MULTILINE)) == set(VERBS)
    assert all(f"usage: vllm-gac {verb} " in page for verb in VERBS)


def test_the_tree_of_packages_is_in_the_order_of_imports() -> None:
    page = _text(ROOT / "docs/architecture.md")
    table = page.partition("| package | what it is |")[2].partition("\n\n")[0]
    order = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    assert sorted(order) == sorted(ALLOWED)
    for name, below in ALLOWED.items():
        assert {*below.split()} <= {*order[order.index(name) :]}, name


def test_the_page_of_the_api_has_every_public_name() -> None:
    named = re.findall(r"^::: ([\w.]+)$", _text(ROOT / "docs/api.md"), re.MULTILINE)
    modules = {name: name.rpartition(".")[0] for name in named}
    assert {name.rpartition(".")[2] for name, of in modules.items() if of == "vllm_gac"} == set(
        vllm_gac.__all__
    )
    for name, module in modules.items():
        assert hasattr(importlib.import_module(module), name.rpartition(".")[2]), name


def example() -> dict[str, Any]:
    """The config.json that the page of the format shows."""
    config: dict[str, Any] = json.loads(_block("json", "### Example"))
    return config


def _block(language: str, after: str) -> str:
    """The first block of code in `language` in the page of the format, `after` these words."""
    match = re.search(rf"```{language}\n(.*?)```", FORMAT.partition(after)[2], re.DOTALL)
    assert match is not None
    return match[1]


def _tensors(block: str) -> dict[str, tuple[int, ...]]:
    """Name and shape of each line."""
    lines = (line.split(maxsplit=1) for line in block.splitlines())
    return {name: tuple(json.loads(shape)) for name, shape in lines}


@cache
def _text(page: Path) -> str:
    return page.read_text()


def _commands(page: Path) -> Iterator[list[str]]:
    """The words of each command of ours in a page's blocks for a shell."""
    for block in re.findall(r"```sh\n(.*?)```", _text(page), flags=re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            if line.startswith("vllm-gac "):
                yield shlex.split(line, comments=True)


def _prose(page: Path) -> str:
    """A page without its blocks of code."""
    return re.sub(r"```.*?```", "", _text(page), flags=re.DOTALL)


def _links(page: Path) -> list[str]:
    """Targets of the links and pictures of a page, but for other sites' and those in code."""
    targets = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", _prose(page)))
    return [target for target in targets if not re.match(r"[a-z]+:", target)]


def _leads_somewhere(page: Path, target: str) -> bool:
    path, _, anchor = target.partition("#")
    file = (page.parent / path).resolve() if path else page
    if file.is_dir():
        file /= "README.md"
        return not anchor or (file.is_file() and anchor in _anchors(file))
    return file.is_file() and (not anchor or anchor in _anchors(file))


def _anchors(page: Path) -> set[str]:
    """The headings of a page, as links name them."""
    headings = re.findall(r"^#+ (.+)$", _prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _named(page: Path) -> Iterator[tuple[str, str]]:
    """(file, name in it or "") of each `path/file.py` and `path/file.py: name` of a page."""
    for span in re.findall(r"`([^`\n]+)`", _prose(page)):
        if match := re.fullmatch(r"((?:[\w.-]+/)+(?:[\w-]+\.(?:py|md|txt|in|svg|yaml))?)", span):
            yield match[1], ""
        elif match := re.fullmatch(r"((?:[\w.-]+/)*[\w-]+\.py): ([\w.]+)", span):
            yield match[1], match[2]


def _is_there(path: str, name: str) -> bool:
    """Paths are those of the repository, or of the package."""
    file = next((f for f in (ROOT / path, ROOT / "vllm_gac" / path) if f.exists()), None)
    if file is None or not name:
        return file is not None
    return name in _defined(ast.parse(file.read_text()).body)


def _defined(body: list[ast.stmt], prefix: str = "") -> set[str]:
    """Functions, classes, their members and module variables, as `Class.member`."""
    names = set()
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(prefix + node.name)
        if isinstance(node, ast.ClassDef):
            names |= _defined(node.body, f"{prefix}{node.name}.")
        if isinstance(node, ast.Assign):
            names |= {prefix + t.id for t in node.targets if isinstance(t, ast.Name)}
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(prefix + node.target.id)
    return names

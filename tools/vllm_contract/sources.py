"""The sources of a vLLM release, read without importing them; and what of them has changed."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import yaml

from vllm_gac.serving.config.kv_transfer import SEEN_TO_WORK

_RELIED_ON = yaml.safe_load(Path(__file__).with_name("behaviours.yaml").read_text())
_OF_CUDA_BUILDS = "vllm.vllm_flash_attn.cute."
_CONNECTORS = "vllm.distributed.kv_transfer.kv_connector.factory"
# Modules and environment variables of vLLM that a string of ours names, but not its logger.
_NAMED = re.compile(r'"(?!vllm\.gac")(vllm(?:\.\w+)+|VLLM_[A-Z0-9_]+)"')


class Release:
    """The sources of one release.

    Args:
        root: The directory that holds the folder `vllm`.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def text(self, module: str) -> str | None:
        """The source of a module; None if there is none of that dotted name."""
        place = self.root.joinpath(*module.split("."))
        files = (place.with_suffix(".py"), place / "__init__.py")
        return next((file.read_text() for file in files if file.is_file()), None)

    @property
    def version(self) -> str:
        """The version as vllm/_version.py says it."""
        named = re.search(r"^__version__ = .*'(.+)'", self.text("vllm._version") or "", re.M)
        return named[1] if named else "unknown"

    def find(self, module: str, name: str) -> ast.AST | None:
        """The statement that defines NAME, or CLASS.NAME, in a module; None if nothing does."""
        node: ast.AST | None = _parsed(self.text(module) or "")
        for part in name.split("."):
            node = next((x for x in _statements(node) if _defines(x, part)), None)
        return node

    def fields(self, module: str, cls: str) -> set[str]:
        """The annotated names in the body of a class."""
        body = _statements(self.find(module, cls))
        return {ast.unparse(x.target) for x in body if isinstance(x, ast.AnnAssign)}

    def abstract_methods(self, module: str, cls: str) -> set[str]:
        """The methods that a subclass must define, but for those that bases of the class want."""
        body = _statements(self.find(module, cls))
        functions = [x for x in body if isinstance(x, ast.FunctionDef | ast.AsyncFunctionDef)]
        return {
            x.name
            for x in functions
            if "abstractmethod" in " ".join(map(ast.unparse, x.decorator_list))
        }


def changes(release: Release, installed: Release, ours: Path) -> Iterator[str]:
    """A sentence for everything that a release does not say, or says otherwise than we rely on.

    Args:
        release: The release to check.
        installed: One that has everything.
        ours: The directory of our sources.
    """
    for file in sorted(ours.rglob("*.py")):
        for name in sorted(set(_NAMED.findall(file.read_text()))):
            place, text = ("vllm.envs", f'"{name}"') if name.isupper() else (name, "")
            source = release.text(place)
            if source is None or text not in source:
                yield f"there is no {name} ({file.name})"
    for module, names in _RELIED_ON["says"].items():
        if module.startswith(_OF_CUDA_BUILDS) and release.text(module) is None:
            continue
        for name, says in names.items():
            for why, quotes in says.items():
                if fault := _fault(release.find(module, name), quotes):
                    yield f"{module}.{name} {fault}: check that {why}"
    for replaced, attributes in _RELIED_ON["overridden"].items():
        module, _, cls = replaced.rpartition(".")
        for attribute in attributes.split():
            if release.find(module, f"{cls}.{attribute}") is None:
                yield f"{replaced} has no {attribute}, which ours replaces or sets"
        wanted = (x.abstract_methods(module, cls) for x in (release, installed))
        for method in sorted(set.difference(*wanted)):
            yield f"{replaced} wants a method {method}, which ours may lack"
    for name in SEEN_TO_WORK:
        if f'"{name}"' not in (release.text(_CONNECTORS) or ""):
            yield f"{_CONNECTORS} has no connector {name}, which we allow"


def _fault(node: ast.AST | None, quotes: str | list[str]) -> str | None:
    """What is wrong with a definition, which must say one of some quotes."""
    if node is None:
        return "is not there"
    source = _without_spaces(ast.unparse(node))
    quotes = [quotes] if isinstance(quotes, str) else quotes
    if any(_without_spaces(quote) in source for quote in quotes):
        return None
    return "does not say " + " or ".join(f"`{quote}`" for quote in quotes)


_parsed = cache(ast.parse)


def _without_spaces(code: str) -> str:
    return re.sub(r"\s+", "", code)


def _statements(node: ast.AST | None) -> Iterator[ast.AST]:
    """Those that run when a module is imported or a class made; and what its methods assign."""
    for child in ast.iter_child_nodes(node) if node is not None else ():
        yield child
        if isinstance(child, ast.If | ast.Try | ast.With | ast.ExceptHandler):
            yield from _statements(child)
        elif isinstance(node, ast.ClassDef) and isinstance(child, ast.FunctionDef):
            yield from (x for x in ast.walk(child) if isinstance(x, ast.Assign | ast.AnnAssign))


def _defines(node: ast.AST, name: str) -> bool:
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return node.name == name
    targets = getattr(node, "targets", None) or [getattr(node, "target", None)]
    return any(ast.unparse(x) in (name, f"self.{name}") for x in targets if x is not None)

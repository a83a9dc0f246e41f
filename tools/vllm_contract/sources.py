"""The sources of a vLLM release, read without importing them: names, classes, attributes."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

# Bases from outside of vLLM that bring no attributes but dunders, and an enum's name and value.
_WITHOUT_ATTRIBUTES = {"ABC", "Generic", "Protocol", "object", "Enum", "IntEnum", "str", "type"}

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Definition:
    """Where a name is defined: its module, and the statement that defines it.

    `node` is the whole module for a name that is a module.
    """

    module: str
    name: str
    node: ast.AST

    def __str__(self) -> str:
        return f"{self.module}.{self.name}" if self.name else self.module


class Release:
    """The sources of one release.

    Args:
        root: The directory that holds the folder `vllm`.
        ours: The directory that holds the folder `vllm_gac`, whose classes extend vLLM's.
    """

    def __init__(self, root: Path, ours: Path) -> None:
        self.root, self.ours = root, ours
        self._modules: dict[str, ast.Module | None] = {}
        self._names: dict[str, dict[str, list[ast.stmt]]] = {}
        self._found: dict[tuple[str, str], Definition | None] = {}
        self._members: dict[ast.ClassDef, dict[str, ast.AST]] = {}

    @cached_property
    def version(self) -> str:
        """The version as vllm/_version.py says it."""
        for statement in self.names("vllm._version").get("__version__", []):
            if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Constant):
                return str(statement.value.value)
        return "unknown"

    def module(self, name: str) -> ast.Module | None:
        """The parsed module; None if there is none of that dotted name."""
        if name not in self._modules:
            place = self._place(name)
            known = name.split(".")[0] in ("vllm", "vllm_gac")
            files = (place.with_suffix(".py"), place / "__init__.py") if known else ()
            file = next((file for file in files if file.is_file()), None)
            self._modules[name] = None if file is None else ast.parse(file.read_text())
        return self._modules[name]

    def _place(self, module: str) -> Path:
        parts = module.split(".")
        return (self.ours if parts[0] == "vllm_gac" else self.root).joinpath(*parts)

    def names(self, module: str) -> dict[str, list[ast.stmt]]:
        """By name, the statements at the top of `module` that define or import it."""
        if module not in self._names:
            statements: dict[str, list[ast.stmt]] = {}
            for statement in self._statements(module):
                for name in _defined(statement):
                    statements.setdefault(name, []).append(statement)
                if module == "vllm.envs":  # finds its variables by the keys of a dictionary
                    for name in _keys(statement):
                        statements.setdefault(name, []).append(statement)
            self._names[module] = statements
        return self._names[module]

    def _statements(self, module: str) -> list[ast.stmt]:
        parsed = self.module(module)
        if parsed is None:
            return []
        statements = [*_top_level(parsed.body)]
        # Our functions import vLLM themselves, and no two of them give a name two meanings.
        if module.startswith("vllm_gac."):
            statements += [x for x in ast.walk(parsed) if isinstance(x, ast.ImportFrom)]
        return statements

    def find(self, module: str, name: str) -> Definition | None:
        """Where `from module import name` leads; None if it fails."""
        if (module, name) not in self._found:
            self._found[module, name] = self._find(module, name, frozenset())
        return self._found[module, name]

    def _find(self, module: str, name: str, seen: frozenset[str]) -> Definition | None:
        if f"{module}.{name}" in seen or self.module(module) is None:
            return None
        seen |= {f"{module}.{name}"}
        for statement in self.names(module).get(name, []):
            if isinstance(statement, ast.ImportFrom):
                alias = next(a for a in statement.names if name in (a.asname, a.name))
                source = self._source(module, statement)
                definition = self._find(source, alias.name, seen)
                if definition is not None:
                    return definition
                continue
            if not _is_overload(statement):
                return Definition(module, name, statement)
        submodule = self.module(f"{module}.{name}")
        if submodule is not None:
            return Definition(f"{module}.{name}", "", submodule)
        for statement in self.names(module).get("*", []):
            if isinstance(statement, ast.ImportFrom):
                definition = self._find(self._source(module, statement), name, seen)
                if definition is not None:
                    return definition
        return None

    def _source(self, module: str, statement: ast.ImportFrom) -> str:
        """The module that an import in `module` names, relative or not."""
        if not statement.level:
            return statement.module or ""
        is_package = (self._place(module) / "__init__.py").is_file()
        parts = module.split(".")
        parts = parts[: len(parts) - statement.level + is_package]
        return ".".join([*parts, *filter(None, [statement.module])])

    def resolve(self, module: str, expression: ast.expr) -> Definition | None:
        """What a name, or a dotted name, means within `module`."""
        if isinstance(expression, ast.Subscript):  # a generic base: Base[T]
            return self.resolve(module, expression.value)
        if isinstance(expression, ast.Name):
            return self.find(module, expression.id)
        if isinstance(expression, ast.Attribute):
            owner = self.resolve(module, expression.value)
            if owner is not None and isinstance(owner.node, ast.Module):
                return self.find(owner.module, expression.attr)
        return None

    def chain(self, cls: Definition) -> list[Definition]:
        """The class and those of its bases that are vLLM's, nearest first."""
        if not isinstance(cls.node, ast.ClassDef):
            return []
        classes = [cls]
        for base in cls.node.bases:
            definition = self.resolve(cls.module, base)
            if definition is not None and definition.node is not cls.node:
                classes += [x for x in self.chain(definition) if x not in classes]
        return classes

    def foreign_bases(self, cls: Definition) -> set[str]:
        """Names of the bases whose attributes we do not see, because they are not vLLM's."""
        names = set()
        for link in self.chain(cls):
            assert isinstance(link.node, ast.ClassDef)
            for base in link.node.bases:
                known = self.resolve(link.module, base)
                if known is None or not isinstance(known.node, ast.ClassDef):
                    names.add(ast.unparse(base).split("[")[0].split(".")[-1])
        return names - _WITHOUT_ATTRIBUTES

    def members(self, cls: Definition) -> dict[str, ast.AST]:
        """By name, what a class itself defines in its body or assigns to `self`."""
        assert isinstance(cls.node, ast.ClassDef)
        if cls.node not in self._members:
            self._members[cls.node] = _members(cls.node)
        return self._members[cls.node]

    def attribute(self, cls: Definition, name: str) -> Definition | None:
        """Where an attribute of a class is defined, in the class or in one of its bases."""
        for link in self.chain(cls):
            node = self.members(link).get(name)
            if node is not None:
                return Definition(link.module, name, node)
        return None

    def method(self, cls: Definition, name: str) -> Definition | None:
        """The method of a class, its own or inherited; None if it has none of that name."""
        member = self.attribute(cls, name)
        return member if member is not None and isinstance(member.node, Function) else None

    def abstract_methods(self, cls: Definition) -> set[str]:
        """Names of the methods that a class that is to be used must define itself."""
        names: dict[str, bool] = {}
        for link in reversed(self.chain(cls)):
            for name, node in self.members(link).items():
                if isinstance(node, Function):
                    names[name] = "abstractmethod" in map(_last_name, node.decorator_list)
        return {name for name, abstract in names.items() if abstract}

    def type_of(self, definition: Definition) -> Definition | None:
        """The class of vLLM that an annotated name, a property or a function's result has."""
        node = definition.node
        annotation = None
        if isinstance(node, ast.AnnAssign):
            annotation = node.annotation
        elif isinstance(node, Function):
            annotation = node.returns
        if annotation is None:
            return None
        return next(self.annotated(definition.module, annotation), None)

    def annotated(self, module: str, annotation: ast.expr) -> Iterator[Definition]:
        """The classes of vLLM that an annotation names, quoted or not."""
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            annotation = ast.parse(annotation.value, mode="eval").body
        for node in ast.walk(annotation):
            if isinstance(node, ast.Name):
                definition = self.find(module, node.id)
                if definition is not None and isinstance(definition.node, ast.ClassDef):
                    yield definition


def _top_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements that run when a module is imported, those in branches included."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.If | ast.Try | ast.With):
            yield from _top_level(statement.body)
        if isinstance(statement, ast.If | ast.Try):
            yield from _top_level(statement.orelse)
        if isinstance(statement, ast.Try):
            for handler in statement.handlers:
                yield from _top_level(handler.body)


def _defined(statement: ast.stmt) -> Iterator[str]:
    """The names that a statement defines or imports."""
    if isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        yield statement.name
    elif isinstance(statement, ast.ImportFrom):
        yield from (alias.asname or alias.name for alias in statement.names)
    elif isinstance(statement, ast.Assign):
        for target in statement.targets:
            yield from (node.id for node in ast.walk(target) if isinstance(node, ast.Name))
    elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        yield statement.target.id


def _keys(statement: ast.stmt) -> Iterator[str]:
    """The keys of the dictionary that a statement assigns, as far as they are strings."""
    value = statement.value if isinstance(statement, ast.Assign | ast.AnnAssign) else None
    for key in value.keys if isinstance(value, ast.Dict) else ():
        if isinstance(key, ast.Constant) and isinstance(key.value, str):
            yield key.value


def _is_overload(statement: ast.stmt) -> bool:
    return isinstance(statement, Function) and "overload" in map(
        _last_name, statement.decorator_list
    )


def _members(cls: ast.ClassDef) -> dict[str, ast.AST]:
    members: dict[str, ast.AST] = {}
    for statement in _top_level(cls.body):
        if isinstance(statement, Function):
            members.setdefault(statement.name, statement)
        else:
            for name in _defined(statement):
                members.setdefault(name, statement)
    for method in cls.body:
        if isinstance(method, Function):
            for node in ast.walk(method):
                if _is_of_self(node) and isinstance(node.ctx, ast.Store):  # type: ignore[attr-defined]
                    members.setdefault(node.attr, node)  # type: ignore[attr-defined]
    return members


def _is_of_self(node: ast.AST) -> bool:
    is_attribute = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
    return is_attribute and node.value.id == "self"  # type: ignore[attr-defined]


def _last_name(expression: ast.expr) -> str:
    return ast.unparse(expression).split("(")[0].split(".")[-1]

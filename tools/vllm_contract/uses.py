"""What the sources of vllm-gac import of vLLM, call, override and read; and what of it is broken.

A small type checker: it knows the class of a name from annotations, ours and vLLM's, and checks
each attribute and each call of which it knows the class. What it does not know it leaves alone.

mypy on the sources of a release, whose package is typed, does not replace it. Of the 13 changes
that the tests plant it finds 8. It does not see modules and environment variables that we name in
strings, attributes and abstract methods that vLLM expects of our classes, and names that a module
of vLLM only passes on. And of the installed release, which has all that we use, it reports 28
faults, where our types are looser or stricter than vLLM's.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from torch import nn

from tools.vllm_contract.signatures import Signature, signature_of
from tools.vllm_contract.sources import Definition, Function, Release

# Where vLLM defines the operators that are called as torch.ops.vllm.NAME.
OPERATORS = "vllm.model_executor.layers.attention.attention"
# What only looks like a module of vLLM (a logger), like an override (a method that our own code
# calls) or like an attribute that vLLM reads (one that our own code sets).
_NO_MODULES = {"vllm.gac"}
_NO_OVERRIDES = {"GacAttention.forward"}
_OWN_ATTRIBUTES = {"GacConfigParser.before"}
# Attributes that only the subclasses of a class set.
_OF_SUBCLASSES = {"LinearBase.bias"}
_OF_ENUMS = {"name", "value"}
_MODULE = nn.Module()

Types = dict[str, Definition]


class Uses:
    """What one of our source files uses of vLLM.

    Args:
        release: The release to compare with.
        name: Dotted name of our module.
        file: Its source.
        label: The file's name in faults.

    Once `broken` has run, `names` has what is imported, `members` the class or module and the name
    of each attribute that is read, and `overrides` the base and the name of each method of ours
    that stands for one of vLLM's.
    """

    def __init__(self, release: Release, name: str, file: Path, label: str) -> None:
        self.release, self.name, self.label = release, name, label
        self.tree = ast.parse(file.read_text())
        self.names: set[str] = set()
        self.members: set[tuple[str, str]] = set()
        self.overrides: set[tuple[str, str]] = set()
        self.calls = 0

    def broken(self) -> Iterator[str]:
        """A sentence for everything that the release does not have, with the line that uses it."""
        if not any(_is_vllm(name) for name in _imported(self.tree)):
            return
        faults = [*self._imports(), *self._strings(), *self._classes()]
        faults += self._bodies(self.tree, {}, None)
        for line, fault in sorted(set(faults)):
            yield f"{fault} ({self.label}:{line})"

    def _imports(self) -> Iterator[tuple[int, str]]:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom) and _is_vllm(node.module or ""):
                module = node.module or ""
                if self.release.module(module) is None:
                    yield node.lineno, f"there is no module {module}"
                    continue
                for alias in node.names:
                    self.names.add(f"{module}.{alias.name}")
                    if self.release.find(module, alias.name) is None:
                        yield node.lineno, f"{module} has no {alias.name}"
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    if _is_vllm(alias.name) and self.release.module(alias.name) is None:
                        yield node.lineno, f"there is no module {alias.name}"

    def _strings(self) -> Iterator[tuple[int, str]]:
        """Modules and environment variables that the code names in strings."""
        for node in ast.walk(self.tree):
            if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
                continue
            text = node.value
            is_module = re.fullmatch(r"vllm(\.\w+)+", text) and text not in _NO_MODULES
            if is_module:
                self.names.add(text)
                if self.release.module(text) is None:
                    yield node.lineno, f"there is no module {text}"
            is_variable = re.fullmatch(r"VLLM_[A-Z0-9_]+", text)
            if is_variable:
                self.members.add(("vllm.envs", text))
                if self.release.find("vllm.envs", text) is None:
                    yield node.lineno, f"vllm.envs has no {text}"

    def _classes(self) -> Iterator[tuple[int, str]]:
        """Classes of ours that extend vLLM's: overrides, class attributes, abstract methods."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ClassDef):
                ours = Definition(self.name, node.name, node)
                bases = [x for x in self.release.chain(ours) if _is_vllm(x.module)]
                if bases:
                    yield from self._extends(node, ours, bases)

    def _extends(
        self, node: ast.ClassDef, ours: Definition, bases: list[Definition]
    ) -> Iterator[tuple[int, str]]:
        for statement in node.body:
            if isinstance(statement, Function):
                known = self._of_bases(bases, statement.name)
                if known is not None and f"{node.name}.{statement.name}" not in _NO_OVERRIDES:
                    self.overrides.add((str(bases[0]), statement.name))
                    fault = self._override(statement, known, f"{bases[0]}.{statement.name}")
                    if fault:
                        yield statement.lineno, fault
            elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                attribute = statement.target.id
                is_ours = f"{node.name}.{attribute}" in _OWN_ATTRIBUTES
                if not is_ours and self._of_bases(bases, attribute) is None:
                    yield statement.lineno, f"{bases[0]} has no attribute {attribute}"
        if not node.name.startswith("Packed"):  # a base of ours, whose classes define the rest
            for name in sorted(self.release.abstract_methods(ours)):
                yield node.lineno, f"{bases[0]} wants a method {name}, which {node.name} lacks"

    def _of_bases(self, bases: list[Definition], name: str) -> Definition | None:
        attributes = (self.release.attribute(base, name) for base in bases)
        return next((x for x in attributes if x is not None), None)

    def _override(self, ours: Function, known: Definition, where: str) -> str | None:
        if not isinstance(known.node, Function):
            return None
        self.calls += 1
        decorators = {ast.unparse(x) for x in known.node.decorator_list}
        # We call the constructors of what we make ourselves; those of abstract bases vLLM calls.
        if ours.name == "__init__" and "abstractmethod" not in decorators:
            return None
        # What the constructor of an attention implementation takes beside, our layers give.
        given_by_us = ours.name == "__init__"
        fault = signature_of(ours).cannot_stand_for(signature_of(known.node), given_by_us)
        return None if fault is None else f"{where} {fault}"

    def _bodies(
        self, tree: ast.AST, types: Types, owner: Definition | None
    ) -> Iterator[tuple[int, str]]:
        """Faults in what runs: attributes and calls, with the types of names that are in scope."""
        for node in ast.iter_child_nodes(tree):
            if isinstance(node, ast.ClassDef):
                ours = Definition(self.name, node.name, node)
                yield from self._bodies(node, types, ours)
            elif isinstance(node, Function):
                yield from self._bodies(node, self._with_arguments(node, types, owner), owner)
            else:
                yield from self._checks(node, types, owner)
                yield from self._bodies(node, types, owner)
                self._learn(node, types)

    def _with_arguments(self, node: Function, types: Types, owner: Definition | None) -> Types:
        types = dict(types)
        arguments = node.args
        for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
            types.pop(argument.arg, None)
            if argument.arg == "self" and owner is not None:
                types["self"] = owner
            elif argument.annotation is not None:
                named = [*self.release.annotated(self.name, argument.annotation)]
                annotation = ast.unparse(argument.annotation).strip("\"'").split(" | ")[0]
                if named and annotation.isidentifier():
                    types[argument.arg] = named[0]
        return types

    def _learn(self, node: ast.AST, types: Types) -> None:
        """Note the types of names that a statement assigns."""
        if not isinstance(node, ast.Assign) or len(node.targets) != 1:
            return
        target, value = node.targets[0], node.value
        pairs = [(target, value)]
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            pairs = list(zip(target.elts, value.elts, strict=False))
        for name, expression in pairs:
            if isinstance(name, ast.Name):
                known = self._type(expression, types)
                types.pop(name.id, None)
                if known is not None:
                    types[name.id] = known

    def _checks(
        self, node: ast.AST, types: Types, owner: Definition | None
    ) -> Iterator[tuple[int, str]]:
        if isinstance(node, ast.Attribute):
            cls = self._owner(node.value, types)
            if cls is not None:
                self._note(cls, node.attr)
            if cls is not None and not self._has(cls, node.attr):
                yield node.lineno, f"{cls} has no attribute {node.attr}"
        elif isinstance(node, ast.Call):
            called = self._called(node.func, types, owner)
            self.calls += called is not None
            if called is not None:
                definition, signature = called
                fault = signature.cannot_take(node)
                if fault is not None:
                    yield node.lineno, f"{definition} {fault}"

    def _note(self, owner: Definition, attribute: str) -> None:
        """Note that `attribute` is read, of the class of vLLM that has it."""
        links = [owner] if isinstance(owner.node, ast.Module) else self.release.chain(owner)
        for link in links:
            has_it = isinstance(link.node, ast.Module) or attribute in self.release.members(link)
            if has_it and _is_vllm(link.module):
                self.members.add((str(link), attribute))
            if has_it:
                return

    def _called(
        self, function: ast.expr, types: Types, owner: Definition | None
    ) -> tuple[str, Signature] | None:
        """Name and signature of what is called, if it is vLLM's."""
        text = ast.unparse(function)
        if text.startswith("torch.ops.vllm."):
            operator = self.release.find(OPERATORS, text.rpartition(".")[2])
            if operator is None or not isinstance(operator.node, Function):
                return text, Signature.none()
            return text, signature_of(operator.node)
        definition: Definition | None
        if text.startswith("super().") and owner is not None:
            bases = [x for x in self.release.chain(owner)[1:] if _is_vllm(x.module)]
            name = text.removeprefix("super().")
            definition = self._of_bases(bases, name)
            if bases:
                self._note(bases[0], name)
        elif isinstance(function, ast.Attribute) and self._owner(function.value, types):
            cls = self._owner(function.value, types)
            assert cls is not None
            definition = self._member(cls, function.attr)
        elif isinstance(function, ast.Name) and function.id not in types:
            definition = self.release.find(self.name, function.id)
        else:
            definition = None
        if definition is None or not _is_vllm(definition.module):
            return None
        if isinstance(definition.node, ast.ClassDef):
            constructor = self.release.method(definition, "__init__")
            if constructor is None or not isinstance(constructor.node, Function):
                return None
            return str(definition), signature_of(constructor.node)
        return (
            (str(definition), signature_of(definition.node))
            if isinstance(definition.node, Function)
            else None
        )

    def _owner(self, expression: ast.expr, types: Types) -> Definition | None:
        """The class or module of which `expression` is an instance, the class or the module."""
        if isinstance(expression, ast.Name) and expression.id not in types:
            definition = self.release.find(self.name, expression.id)
            is_owner = definition is not None and isinstance(
                definition.node, ast.ClassDef | ast.Module
            )
            if definition is not None and is_owner and _is_vllm(definition.module):
                return definition
        return self._type(expression, types)

    def _type(self, expression: ast.expr, types: Types) -> Definition | None:
        """The class of vLLM, or module, that an expression has."""
        if isinstance(expression, ast.Name):
            if expression.id in types:
                return types[expression.id]
            definition = self.release.find(self.name, expression.id)
            if definition is None or not _is_vllm(definition.module):
                return None
            return (
                definition
                if isinstance(definition.node, ast.Module)
                else self.release.type_of(definition)
            )
        if isinstance(expression, ast.Attribute):
            owner = self._type(expression.value, types)
            member = None if owner is None else self._member(owner, expression.attr)
            return None if member is None else self.release.type_of(member)
        if isinstance(expression, ast.Call) and isinstance(expression.func, ast.Attribute):
            return self._type(expression.func, types)
        return None

    def _member(self, owner: Definition, name: str) -> Definition | None:
        if isinstance(owner.node, ast.Module):
            return self.release.find(owner.module, name)
        return self.release.attribute(owner, name)

    def _has(self, owner: Definition, name: str) -> bool:
        if f"{owner.name}.{name}" in _OF_SUBCLASSES:
            return True
        if name.startswith("__") or self._member(owner, name) is not None:
            return True
        if isinstance(owner.node, ast.Module):
            return False
        bases = self.release.foreign_bases(owner)
        if bases == {"Module"}:
            return hasattr(_MODULE, name)
        return bool(bases) or name in _OF_ENUMS


def uses_of(release: Release) -> Iterator[Uses]:
    """The uses of each of our source files, which are not looked for yet."""
    for file in sorted((release.ours / "vllm_gac").rglob("*.py")):
        path = file.relative_to(release.ours)
        module = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
        yield Uses(release, module, file, str(path))


def _imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield node.module or ""
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def _is_vllm(module: str) -> bool:
    return module == "vllm" or module.startswith("vllm.")

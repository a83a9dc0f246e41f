"""The tensors of a pickled module, by the names of its state dict."""

from collections.abc import Iterator
from typing import Any

from vllm_gac.checkpoint.pickles.values import Instance, StoredTensor
from vllm_gac.errors import CheckpointError

# A model of 126 layers, with two factors for each linear, has 2,800 modules in 5 levels. Without a
# limit, a tree that shares its branches could be far larger than the file.
_MAX_MODULES = 10_000
_MAX_TENSORS = 20_000
# Entries in the dicts of all modules, also those that are None. Modules may share a dict, too.
_MAX_MEMBERS = 60_000
_MAX_DEPTH = 12
_MAX_NAME = 100
_ROOT = "the model"
_KINDS = ("_modules", "_parameters", "_buffers")


def named_tensors(model: Instance, where: str) -> dict[str, StoredTensor]:
    """Every parameter and persistent buffer of `model` by its full name, e.g. model.norm.weight.

    Raises CheckpointError, naming `where` and the module, if it is not a tree of modules.
    """
    tensors: dict[str, StoredTensor] = {}
    seen = 0
    for path, module in modules(model, where):
        here = f"{where}: {path or _ROOT}"
        passing = module.state.get("_non_persistent_buffers_set")
        for name, tensor in [
            *_members(module, "_parameters", here),
            *_members(module, "_buffers", here),
        ]:
            seen += 1
            if seen > _MAX_TENSORS:
                raise CheckpointError(f"{here}: more than {_MAX_TENSORS} tensors")
            if type(passing) is set and name in passing:
                continue
            if type(tensor) is not StoredTensor:
                raise CheckpointError(f"{where}: {path}{name}: not a tensor")
            tensors[path + name] = tensor
    return tensors


def rotary_size(model: Instance, where: str) -> int | None:
    """The head size of the first table of RoPE frequencies: two numbers for each pair."""
    for path, module in modules(model, where):
        if path.endswith("rotary_emb."):
            table = dict(_members(module, "_buffers", f"{where}: {path or _ROOT}")).get("inv_freq")
            if type(table) is StoredTensor and len(table.shape) == 1:
                return 2 * table.shape[0]
    return None


def modules(model: Instance, where: str) -> Iterator[tuple[str, Instance]]:
    """`model` and every module below it, with its path ("" or ending in a dot)."""
    left: list[tuple[str, int, Instance]] = [("", 0, model)]
    seen = members = 0
    while left:
        path, depth, module = left.pop()
        here = f"{where}: {path or _ROOT}"
        seen += 1
        members += sum(len(_dict(module, kind, here)) for kind in _KINDS)
        if members > _MAX_MEMBERS:
            raise CheckpointError(
                f"{here}: more than {_MAX_MEMBERS} names of parameters, buffers and modules, the "
                "most that are read"
            )
        children = list(_members(module, "_modules", here))
        if seen + len(left) + len(children) > _MAX_MODULES or depth > _MAX_DEPTH:
            raise CheckpointError(f"{where}: {path[:_MAX_NAME]}: not a tree of modules")
        yield path, module
        for name, child in reversed(children):
            if type(child) is not Instance:
                raise CheckpointError(f"{where}: {path}{name}: not a module")
            left.append((f"{path}{name}.", depth + 1, child))


def _members(module: Instance, kind: str, where: str) -> Iterator[tuple[str, Any]]:
    """The entries of the dict `kind` in a module's state that are not None."""
    for name, member in _dict(module, kind, where).items():
        if type(name) is not str or not 0 < len(name) <= _MAX_NAME or "." in name:
            raise CheckpointError(f"{where}: {name!r:.100}: not the name of a module or tensor")
        if member is not None:
            yield name, member


def _dict(module: Instance, kind: str, where: str) -> dict[Any, Any]:
    members = module.state.get(kind) if type(module.state) is dict else None
    if type(members) is not dict:
        raise CheckpointError(f"{where}: {module.of.name} has no {kind}: not a torch module")
    return members

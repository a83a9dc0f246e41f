"""Runs code after a module has been imported, without importing it.

vLLM makes every plugin register in every process, the API server included. Importing vLLM's loader
and model registries for that would take over a second in processes that do not need them. Waiting
until vLLM imports them takes no time.
"""

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

Step = Callable[[], None]


def run_after_import(module: str, step: Step) -> None:
    """Run `step` as soon as `module` is imported, now if it is already. `step` must not raise."""
    if module in sys.modules:
        step()
        return
    _pending.setdefault(module, []).append(step)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


class _AfterImport(MetaPathFinder):
    """Makes a module that other finders find run the pending steps after its import."""

    def __init__(self) -> None:
        self._finding: set[str] = set()

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in _pending or name in self._finding:
            return None
        self._finding.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._finding.discard(name)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_then_run_steps(module: ModuleType) -> None:
            execute(module)
            for step in _pending.pop(name, ()):
                step()

        # Each spec has a loader of its own, so this changes no other import.
        spec.loader.exec_module = execute_then_run_steps  # type: ignore[method-assign]
        return spec


_pending: dict[str, list[Step]] = {}
_finder = _AfterImport()

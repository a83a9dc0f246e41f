"""Running code once a module has been imported, without importing it.

vLLM asks every plugin to register in every process, the API server's included. Importing vLLM's
loader and model registries to do so costs over a second where nothing else needs them; waiting
until vLLM imports them itself costs nothing.
"""

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

Step = Callable[[], None]


def once_imported(module: str, step: Step) -> None:
    """Run `step` now if `module` is imported, else as soon as it is. `step` must not raise."""
    if module in sys.modules:
        step()
        return
    _pending.setdefault(module, []).append(step)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


class _AfterImport(MetaPathFinder):
    """Finds nothing itself; it makes the module that others find run the pending steps."""

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

        # The loader belongs to this spec alone.
        spec.loader.exec_module = execute_then_run_steps  # type: ignore[method-assign]
        return spec


_pending: dict[str, list[Step]] = {}
_finder = _AfterImport()

"""Entry point `vllm.general_plugins`: registers gac models with vLLM, and never raises.

vLLM calls `register` in every process (API server, engine core, workers). Registration imports no
module of vLLM, which would take over a second in processes that do not need it: each step waits
until vLLM imports the registry that the step writes to. Where vLLM accepts a path instead of a
class, the step registers the path, so that our modules load late, too.
"""

import functools
import importlib.util
import logging
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from vllm_gac.errors import VersionError
from vllm_gac.layout.families import ARCHITECTURE, LOAD_FORMAT
from vllm_gac.serving.registration import (
    BACKENDS,
    REQUIREMENT,
    installed_version,
    is_supported,
    refuse_if_unregistered,
    registration_failures,
)

if TYPE_CHECKING:
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader import BaseModelLoader
    from vllm.transformers_utils.config_parser_base import ConfigParserBase

logger = logging.getLogger("vllm.gac")  # a child of vLLM's logger, which vLLM configures
Step = Callable[[], None]


def register() -> None:
    """Register architecture, backends, config parser, config hook and load format. Idempotent.

    With a release of vLLM that gac models are not served with, it warns and registers nothing.
    """
    if not is_supported(version := installed_version()):
        logger.warning(
            "vllm-gac registers nothing: it serves gac models with %s, and vLLM %s is installed. "
            "Install one of these, or a release of vllm-gac for vLLM %s",
            REQUIREMENT,
            version,
            version,
        )
        return
    for module, step in (
        ("vllm.model_executor.models.registry", _register_architecture),
        ("vllm.v1.attention.backends.registry", _register_backends),
        ("vllm.transformers_utils.config", _register_config_parser),
        ("vllm.model_executor.models.config", _register_config_hook),
        ("vllm.model_executor.model_loader", _register_loader),
    ):
        run_after_import(module, _guarded(module, step))


def _guarded(module: str, step: Callable[[], None]) -> Callable[[], None]:
    """`step`, with its error kept in `registration_failures` instead of raised."""

    def run() -> None:
        try:
            step()
            registration_failures.pop(module, None)
        except Exception as e:  # vLLM must still serve other models
            registration_failures[module] = f"{type(e).__name__}: {e}"
            logger.exception("vllm-gac could not register; gac models will be refused")

    return run


def _register_architecture() -> None:
    from vllm.model_executor.models.registry import ModelRegistry

    if ARCHITECTURE not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(ARCHITECTURE, f"vllm_gac.serving.model.llama:{ARCHITECTURE}")


def _register_backends() -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    for name, path in BACKENDS.items():
        if name not in AttentionBackendEnum.__members__:
            register_backend(name, path)
            # `vllm serve` pickles its config for processes that have not loaded plugins yet. By
            # default a member is looked up there by its value, which vLLM does not know.
            reduce = functools.partial(_reduced, name)
            setattr(AttentionBackendEnum[name], "__reduce_ex__", reduce)  # noqa: B010


def _reduced(name: str, protocol: int) -> tuple[Callable[[str], Any], tuple[str]]:
    """How pickle stores the backend `name`."""
    return _unpickled_backend, (name,)


def _unpickled_backend(name: str) -> Any:
    """The member of vLLM's enum, in a process that may not have registered it yet."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    _register_backends()
    return AttentionBackendEnum[name]


def _register_config_parser() -> None:
    from vllm_gac.serving.vllm_internals import config_parsers

    parsers = config_parsers()
    if not isinstance(parsers["hf"], functools.partial):
        parsers["hf"] = functools.partial(_config_parser, parsers["hf"])


def _config_parser(before: "type[ConfigParserBase]") -> "ConfigParserBase":
    """Called by vLLM to make a config parser.

    Our module is imported here, not in the registration step: its own import may be what imports
    vLLM's registry and so runs the step.
    """
    from vllm_gac.serving.config.parser import GacConfigParser

    GacConfigParser.before = before
    return GacConfigParser()


def _register_config_hook() -> None:
    from vllm_gac.serving.config.foreign_code import FOREIGN, ForeignCodeHook
    from vllm_gac.serving.config.hook import GacConfigHook
    from vllm_gac.serving.vllm_internals import config_hooks

    hooks = config_hooks()
    hooks[ARCHITECTURE] = GacConfigHook
    for name in FOREIGN:
        if hooks.setdefault(name, ForeignCodeHook) is not ForeignCodeHook:
            raise VersionError(f"{name} has a hook already")


def _register_loader() -> None:
    from vllm_gac.serving.vllm_internals import add_loader

    add_loader(LOAD_FORMAT, _loader)


def _loader(load_config: "LoadConfig") -> "BaseModelLoader":
    """Called by vLLM to make a loader. Imports it late for the reason given in `_config_parser`."""
    refuse_if_unregistered()
    from vllm_gac.serving.loading.loader import GacModelLoader

    return GacModelLoader(load_config)


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

"""Entry point `vllm.general_plugins`: tells vLLM about gac models, and never raises.

vLLM calls `register` in every process (API server, engine core, workers). Nothing is imported
for it: each step waits until vLLM itself imports the registry that the step writes to, and what
is written there names our classes by their paths wherever vLLM accepts a path.
"""

import functools
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm_gac.errors import VersionError
from vllm_gac.layout.names import ARCHITECTURE, LOAD_FORMAT
from vllm_gac.serving.after_import import once_imported
from vllm_gac.serving.registration import BACKENDS, failures

if TYPE_CHECKING:
    from vllm.config.load import LoadConfig
    from vllm.model_executor.model_loader import BaseModelLoader
    from vllm.transformers_utils.config_parser_base import ConfigParserBase

logger = logging.getLogger("vllm.gac")  # below vLLM's logger, so that its configuration applies


def register() -> None:
    """Register architecture, backends, config parser and hook, and load format; idempotent."""
    for module, step in (
        ("vllm.model_executor.models.registry", _register_architecture),
        ("vllm.v1.attention.backends.registry", _register_backends),
        ("vllm.transformers_utils.config", _register_config_parser),
        ("vllm.model_executor.models.config", _register_config_hook),
        ("vllm.model_executor.model_loader", _register_loader),
    ):
        once_imported(module, _guarded(module, step))


def _guarded(module: str, step: Callable[[], None]) -> Callable[[], None]:
    def run() -> None:
        try:
            step()
            failures.pop(module, None)
        except Exception as e:  # vLLM without this plugin is better than no vLLM
            failures[module] = f"{type(e).__name__}: {e}"
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


def _register_config_parser() -> None:
    from vllm_gac.serving.vllm_internals import config_parsers

    parsers = config_parsers()
    if not isinstance(parsers["hf"], functools.partial):
        parsers["hf"] = functools.partial(_config_parser, parsers["hf"])


def _config_parser(before: "type[ConfigParserBase]") -> "ConfigParserBase":
    """What vLLM calls for a parser. Our module may be the one whose import has led to the step."""
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
    """What vLLM calls for a loader; imported then, as `_config_parser` says."""
    from vllm_gac.serving.loading.loader import GacModelLoader

    return GacModelLoader(load_config)

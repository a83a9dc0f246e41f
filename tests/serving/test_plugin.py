"""Registration is idempotent, never raises, and imports nothing until vLLM does."""

import importlib.util
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from packaging.requirements import Requirement

from vllm_gac.errors import VersionError
from vllm_gac.serving import plugin, registration, vllm_internals
from vllm_gac.serving.plugin import run_after_import


def _run(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


def test_register_imports_nothing_of_vllm_or_torch() -> None:
    code = """
import sys
import vllm  # as in vLLM, which calls it
before = set(sys.modules)
from vllm_gac.serving import plugin
plugin.register()
print([m for m in sys.modules.keys() - before if not m.startswith(("vllm_gac", "importlib"))])
"""
    assert _run(code) == "[]"


FIRST = [
    "from vllm.model_executor.layers.quantization import get_quantization_config as g; g('fp8')",
    "import vllm.model_executor.models.registry",
    "import vllm.engine.arg_utils",
    "import vllm_gac.serving.model.llama",
    "import vllm_gac.serving.config.parser",
]


@pytest.mark.parametrize(
    "first", ["", *(pytest.param(code, marks=pytest.mark.slow) for code in FIRST)]
)
def test_everything_is_registered_once_whatever_is_imported_first(first: str) -> None:
    code = f"""
from vllm_gac.layout.families import ARCHITECTURE
from vllm_gac.serving import plugin, registration
plugin.register(); plugin.register()
{first}
from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER as loaders
from vllm.model_executor.models import ModelRegistry
from vllm.model_executor.models.config import MODELS_CONFIG_MAP as hooks
from vllm.transformers_utils.config import get_config_parser
from vllm.v1.attention.backends.registry import AttentionBackendEnum as backends
plugin.register()
from vllm.config.load import LoadConfig
print(type(loaders["gac"](LoadConfig())).__name__, hooks[ARCHITECTURE].__name__,
      type(get_config_parser("hf")).__name__, get_config_parser("hf").before.__name__,
      ARCHITECTURE in ModelRegistry.get_supported_archs(),
      backends["GAC_REFERENCE"].get_class().get_name(), "GAC" in backends.__members__,
      registration.registration_failures)
"""
    parsers = "GacConfigParser HFConfigParser"
    expected = f"GacModelLoader GacConfigHook {parsers} True GAC_REFERENCE True {{}}"
    assert _run(code).splitlines()[-1] == expected


def test_backends_reach_a_process_that_has_registered_nothing() -> None:
    """As from `vllm serve` to its engine, with the config that names one."""
    plugin.register()
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    pickled = [pickle.dumps(AttentionBackendEnum[name]) for name in registration.BACKENDS]
    code = f"import pickle; print(*(pickle.loads(x).get_path() for x in {pickled!r}))"
    assert _run(code).split() == list(registration.BACKENDS.values())
    for name, backend in zip(registration.BACKENDS, pickled, strict=True):
        assert pickle.loads(backend) is AttentionBackendEnum[name]


def test_a_failed_step_is_logged_and_raised_when_a_gac_model_is_requested(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("vllm")
    failures: dict[str, str] = {}
    monkeypatch.setattr(plugin, "registration_failures", failures)
    monkeypatch.setattr(registration, "registration_failures", failures)
    broken = Mock(side_effect=ImportError("no such registry"))
    with caplog.at_level("ERROR", logger=plugin.logger.name):
        monkeypatch.setattr(plugin.logger, "propagate", True)
        plugin._guarded("vllm.some.registry", broken)()
    assert "gac models will be refused" in caplog.text
    with pytest.raises(VersionError, match=r"vllm\.some\.registry"):
        registration.refuse_if_unregistered()


@pytest.mark.parametrize(
    ("version", "supported"),
    [
        ("0.32.0", True),
        ("0.32.1+cpu", True),
        ("0.33.0", True),
        ("0.33.1.dev7+g4ba787ec9", True),
        ("0.31.2", False),
        ("0.34.0rc1", False),
        ("0.330.0", False),
        ("1.32.0", False),
        ("dev", False),
    ],
)
def test_the_supported_releases_are_those_of_the_requirement(version: str, supported: bool) -> None:
    assert registration.is_supported(version) == supported
    if version != "dev":
        required = Requirement(registration.REQUIREMENT).specifier
        assert required.contains(version.removesuffix("rc1"), prereleases=True) == supported


def test_an_unsupported_vllm_gets_a_warning_and_nothing_registered(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(plugin, "installed_version", lambda: "0.34.0")
    monkeypatch.setattr(plugin, "run_after_import", None)  # calling it would fail
    monkeypatch.setattr(plugin.logger, "propagate", True)
    with caplog.at_level("WARNING", logger=plugin.logger.name):
        plugin.register()
    (warning,) = caplog.messages
    assert "0.34.0" in warning
    assert registration.REQUIREMENT in warning


@pytest.mark.parametrize("name", [*vllm_internals._ADAPTER_CHECKS, None])
def test_adapters_are_fitted_before_the_check_that_a_release_has(name: str | None) -> None:
    called: list[str] = []
    manager: Any = SimpleNamespace()
    if name is None:
        with pytest.raises(VersionError, match="--enable-lora"):
            vllm_internals.fit_before_validation(manager, called.append)
        return
    setattr(manager, name, lambda adapter: called.append(f"checked {adapter}"))
    vllm_internals.fit_before_validation(
        manager, lambda adapter: called.append(f"fitted {adapter}")
    )
    getattr(manager, name)("adapter")
    assert called == ["fitted adapter", "checked adapter"]


def test_a_deferred_step_runs_after_the_import_and_not_on_find_spec(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "late_module.py").write_text("VALUE = 7\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    ran: list[int] = []
    run_after_import("late_module", lambda: ran.append(sys.modules["late_module"].VALUE))

    assert importlib.util.find_spec("late_module") is not None
    assert ran == []
    importlib.import_module("late_module")
    assert ran == [7]
    run_after_import("late_module", lambda: ran.append(8))
    assert ran == [7, 8]

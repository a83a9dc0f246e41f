"""Registration is idempotent, never raises, and imports nothing until vLLM does."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_gac.errors import VersionError
from vllm_gac.serving import plugin, registration
from vllm_gac.serving.after_import import run_after_import


def _run(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.strip()


def test_register_imports_nothing_of_vllm_or_torch() -> None:
    code = """
import sys
from pathlib import Path
from vllm_gac.serving import plugin
plugin.register()
print([m for m in sys.modules if m.split(".")[0] in ("vllm", "torch", "transformers")])
"""
    assert _run(code) == "[]"


def test_everything_is_registered_after_vllm_imports_its_registries() -> None:
    code = """
from vllm_gac.layout.names import ARCHITECTURE
from vllm_gac.serving import plugin, registration
plugin.register(); plugin.register()
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


OURS = (
    "model.llama",
    "loading.loader",
    "config.hook",
    "config.parser",
    "attention.reference_backend",
    "metrics",
)
FIRST = [
    "from vllm.model_executor.layers.quantization import get_quantization_config as g; g('fp8')",
    "import vllm.model_executor.models.utils",
    "import vllm.model_executor.models.registry",
    "import vllm.model_executor.model_loader",
    "import vllm.engine.arg_utils",
    *(f"import vllm_gac.serving.{name}" for name in OURS),
]


@pytest.mark.slow
@pytest.mark.parametrize("first", FIRST)
def test_everything_is_registered_whatever_is_imported_first(first: str) -> None:
    code = f"""
from vllm_gac.layout.names import ARCHITECTURE
from vllm_gac.serving import plugin, registration
plugin.register()
{first}
from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER as loaders
from vllm.model_executor.models.config import MODELS_CONFIG_MAP as hooks
from vllm.transformers_utils.config import get_config_parser
from vllm.config.load import LoadConfig
print(type(loaders["gac"](LoadConfig())).__name__, hooks[ARCHITECTURE].__name__,
      type(get_config_parser("hf")).__name__, registration.registration_failures)
"""
    expected = "GacModelLoader GacConfigHook GacConfigParser {}"
    assert _run(code).splitlines()[-1] == expected


def test_a_failed_step_is_logged_and_raised_when_a_gac_model_is_requested(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("vllm")
    failures: dict[str, str] = {}
    monkeypatch.setattr(plugin, "registration_failures", failures)
    monkeypatch.setattr(registration, "registration_failures", failures)

    def broken() -> None:
        raise ImportError("no such registry")

    with caplog.at_level("ERROR", logger=plugin.logger.name):
        monkeypatch.setattr(plugin.logger, "propagate", True)
        plugin._guarded("vllm.some.registry", broken)()
    assert "gac models will be refused" in caplog.text
    with pytest.raises(VersionError, match=r"vllm\.some\.registry: ImportError: no such registry"):
        registration.refuse_if_unregistered()


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

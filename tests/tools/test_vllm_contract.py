"""vLLM has what vllm-gac relies on; and a release that lacks something is told so in one line."""

import ast
from collections.abc import Mapping
from pathlib import Path

import pytest
import vllm

from tools.vllm_contract import __main__ as command
from tools.vllm_contract.__main__ import ROOT, broken
from tools.vllm_contract.behaviours import changed_behaviours
from tools.vllm_contract.sources import Release
from tools.vllm_contract.uses import Uses
from vllm_gac.serving import registration

INSTALLED = Release(Path(vllm.__file__).parents[1], ROOT)
# A small vLLM, and code of ours that uses all of it.
VLLM = {
    "vllm/__init__.py": "",
    "vllm/_version.py": "__version__ = version = '9.9.9'",
    "vllm/envs.py": "environment_variables = {'VLLM_SWITCH': lambda: '0'}",
    "vllm/config/__init__.py": "from vllm.config.cache import CacheConfig\n"
    "class VllmConfig:\n    cache_config: CacheConfig\n    pages: int | None = None",
    "vllm/config/cache.py": "class CacheConfig:\n    dtype: str = 'auto'\n"
    "    def rows(self, of: int) -> int: ...",
    "vllm/backend.py": "from abc import ABC, abstractmethod\n"
    "class Backend(ABC):\n    def __init__(self) -> None:\n        self.scale = 1.0\n"
    "    graphs: bool = False\n"
    "    @abstractmethod\n    def forward(self, query, output=None): ...\n"
    "    def build(self, batch): ...",
    "vllm/helpers.py": "if True:\n    from vllm.fast import split",
    "vllm/fast.py": "def split(batch, *, threshold=1, exact=False): ...",
}
OURS = """
from vllm import envs
from vllm.backend import Backend
from vllm.config import VllmConfig
from vllm.helpers import split

SWITCH = "VLLM_SWITCH"
PLACE = "vllm.config.cache"

class GacBackend(Backend):
    graphs: bool = True

    def forward(self, query, output=None):
        super().build(query)
        return self.scale * query

    def rows(self, vllm_config: "VllmConfig", size: int = 1) -> int:
        cache, pages = vllm_config.cache_config, vllm_config.pages
        split(cache.dtype, threshold=envs.VLLM_SWITCH)
        return cache.rows(of=size) * pages
"""


def small_release(directory: Path, changes: Mapping[str, str | None] | None = None) -> Release:
    """OURS beside the small vLLM, some of whose files are changed or left out."""
    ours = {"vllm_gac/__init__.py": "", "vllm_gac/ours.py": OURS}
    for name, source in (VLLM | ours | dict(changes or {})).items():
        if source is not None:
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            (directory / name).write_text(source)
    return Release(directory, directory)


def _faults(tmp_path: Path, changes: dict[str, str | None]) -> list[str]:
    release, ours = small_release(tmp_path, changes), tmp_path / "vllm_gac/ours.py"
    return [*Uses(release, "vllm_gac.ours", ours, "ours.py").broken()]


def test_a_release_with_everything_has_no_faults(tmp_path: Path) -> None:
    assert _faults(tmp_path, {}) == []


@pytest.mark.parametrize(
    ("file", "before", "after", "fault"),
    [
        ("vllm/fast.py", "def split(", "def cut(", "vllm.helpers has no split (ours.py:5)"),
        ("vllm/fast.py", "threshold", "limit", "vllm.fast.split takes no argument threshold"),
        ("vllm/fast.py", "exact=False", "exact", "vllm.fast.split requires exact (ours.py:19)"),
        ("vllm/envs.py", "SWITCH", "TOGGLE", "vllm.envs has no VLLM_SWITCH (ours.py:7)"),
        ("vllm/config/cache.py", "dtype:", "type:", "CacheConfig has no attribute dtype"),
        ("vllm/config/cache.py", "of:", "size:", "vllm.config.cache.rows takes no argument of"),
        ("vllm/config/__init__.py", "pages:", "blocks:", "VllmConfig has no attribute pages"),
        ("vllm/backend.py", "graphs", "captured", "vllm.backend.Backend has no attribute graphs"),
        ("vllm/backend.py", "self.scale", "self.factor", "GacBackend has no attribute scale"),
        ("vllm/backend.py", "batch)", "batch, fast)", "vllm.backend.build requires fast"),
        (
            "vllm/backend.py",
            "output=None)",
            "key, output=None)",
            "vllm.backend.Backend.forward takes key as argument 2, our override does not",
        ),
        (
            "vllm/backend.py",
            "    def build",
            "    @abstractmethod\n    def scales(self): ...\n    def build",
            "vllm.backend.Backend wants a method scales, which GacBackend lacks",
        ),
    ],
)
def test_missing_names_of_a_release_are_reported(
    file: str, before: str, after: str, fault: str, tmp_path: Path
) -> None:
    assert before in VLLM[file]
    faults = _faults(tmp_path, {file: VLLM[file].replace(before, after)})
    assert any(fault in line for line in faults), faults
    assert not any("\n" in line for line in faults)


def test_a_module_that_is_gone_is_named(tmp_path: Path) -> None:
    moved = {
        "vllm/config/cache.py": None,
        "vllm/config/__init__.py": "class VllmConfig:\n    cache_config = pages = None",
    }
    assert _faults(tmp_path, moved) == ["there is no module vllm.config.cache (ours.py:8)"]


def test_the_installed_release_has_all_that_we_rely_on() -> None:
    faults, checked = broken(INSTALLED)
    assert faults == []
    assert int(checked.split()[0]) > 60, f"too little was found to check: {checked}"
    assert registration.is_supported(INSTALLED.version)


class Changed(Release):
    """The installed release with one text of one module replaced."""

    def __init__(self, module: str, before: str, after: str) -> None:
        super().__init__(INSTALLED.root, ROOT)
        source = (INSTALLED.root / f"{module.replace('.', '/')}.py").read_text()
        assert before in source
        self.changed = {module: ast.parse(source.replace(before, after))}

    def module(self, name: str) -> ast.Module | None:
        return self.changed.get(name) or INSTALLED.module(name)


@pytest.mark.parametrize(
    ("module", "before", "after", "fault"),
    [
        (
            "vllm.lora.worker_manager",
            "_adapter_manager._validate_",
            "_adapter_manager._check_",
            "check that adapters are padded or refused before they are copied",
        ),
        (
            "vllm.model_executor.models.llama",
            "self._init_model(",
            "self._make_model(",
            "check that our model is built in place of vLLM's",
        ),
        (
            "vllm.v1.attention.backend",
            "def build_for_drafting",
            "def build_draft",
            "AttentionMetadataBuilder has no build_for_drafting, which ours replaces or sets",
        ),
        (
            "vllm.distributed.kv_transfer.kv_connector.factory",
            '"NixlConnector"',
            '"NixlNextConnector"',
            "no connector NixlConnector, which vllm_gac.serving.config.kv_transfer allows",
        ),
    ],
)
def test_a_change_in_how_vllm_uses_us_is_noticed(
    module: str, before: str, after: str, fault: str
) -> None:
    faults = [*changed_behaviours(Changed(module, before, after))]
    assert any(fault in line for line in faults), faults


def test_the_command_prints_what_is_broken_and_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["vllm_contract", str(tmp_path)])
    with pytest.raises(SystemExit):
        command.main()
    assert f"{tmp_path}: " in capsys.readouterr().err
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/_version.py").write_text(VLLM["vllm/_version.py"])
    broken_uses: list[str] = []
    monkeypatch.setattr(command, "broken", lambda release: (broken_uses, "7 names"))
    assert command.main() == 0
    broken_uses.append("vllm.config has no VllmConfig (ours.py:1)")
    assert command.main() == 1
    printed = capsys.readouterr()
    assert printed.out == f"{broken_uses[0]}\n"
    assert printed.err.splitlines() == [f"vLLM 9.9.9: 7 names, {n} broken" for n in (0, 1)]


def test_new_engine_options_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fields = {"one": "model: str", "two": "model: str\n    seed: int = 0\n    eager = False"}
    for name, body in fields.items():
        (tmp_path / name / "vllm/engine").mkdir(parents=True)
        for package in ("vllm", "vllm/engine"):
            (tmp_path / name / package / "__init__.py").touch()
        source = f"class EngineArgs:\n    {body}\n"
        (tmp_path / name / "vllm/engine/arg_utils.py").write_text(source)
    monkeypatch.setattr(command, "broken", lambda release: ([], "nothing"))
    monkeypatch.setattr("sys.argv", ["vllm_contract", *(str(tmp_path / x) for x in fields)])
    assert command.main() == 0
    assert "new engine options in vLLM unknown: seed\n" in capsys.readouterr().out

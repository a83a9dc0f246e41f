"""vLLM has what vllm-gac relies on; and a release that lacks something is told so in one line."""

from collections import Counter
from pathlib import Path

import pytest

from tools.vllm_contract import __main__ as command
from tools.vllm_contract.__main__ import ROOT, installed_release, type_faults
from tools.vllm_contract.sources import Release, changes
from vllm_gac.serving import registration

INSTALLED = installed_release()
ATTENTION = "vllm.v1.attention.backend"

OURS = """
from vllm.backend import Backend

class Ours(Backend):
    def forward(self, query: int, output: int = 0) -> int:
        self.build(batch=query)
        return self.scale + output
"""
VLLM = """
class Backend:
    def __init__(self) -> None:
        self.scale = 1

    def build(self, batch: int) -> None: ...

    def forward(self, query: int, output: int = 0) -> int: ...
"""


class Changed(Release):
    """The installed release with one text of one module replaced; or, for "", without it."""

    def __init__(self, module: str, before: str, after: str) -> None:
        super().__init__(INSTALLED.root)
        source = INSTALLED.text(module) or ""
        assert before in source
        self.changed = {module: source.replace(before, after) if before else None}

    def text(self, module: str) -> str | None:
        return self.changed[module] if module in self.changed else super().text(module)


def test_the_installed_release_has_all_that_we_rely_on() -> None:
    assert [*changes(INSTALLED, INSTALLED, ROOT / "vllm_gac")] == []
    assert registration.is_supported(INSTALLED.version)


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
        (ATTENTION, "def build_for_drafting", "def build_draft", "has no build_for_drafting"),
        (
            ATTENTION,
            "    def build_for_drafting",
            "    @abstractmethod\n    def scales(self): ...\n\n    def build_for_drafting",
            "AttentionMetadataBuilder wants a method scales",
        ),
        (
            "vllm.distributed.kv_transfer.kv_connector.factory",
            '"NixlConnector"',
            '"NixlNextConnector"',
            "no connector NixlConnector",
        ),
        ("vllm.envs", '"VLLM_USE_BREAK', '"VLLM_NO_BREAK', "no VLLM_USE_BREAKABLE_CUDAGRAPH"),
        ("vllm.model_executor.models.registry", "", "", "no vllm.model_executor.models.registry"),
    ],
)
def test_a_change_that_no_types_show_is_noticed(
    module: str, before: str, after: str, fault: str
) -> None:
    faults = [*changes(Changed(module, before, after), INSTALLED, ROOT / "vllm_gac")]
    assert len(faults) == 1
    assert fault in faults[0]


def test_a_change_that_types_show_is_noticed(tmp_path: Path) -> None:
    def faults(vllm: str) -> str:
        for name, source in {"vllm/backend": vllm, "ours/ours": OURS}.items():
            file = tmp_path / f"{name}.py"
            file.parent.mkdir(exist_ok=True)
            (file.parent / "__init__.py").touch()
            file.write_text(source)
        return "\n".join(type_faults(tmp_path / "ours", Release(tmp_path)))

    assert faults(VLLM) == ""
    changed = (
        VLLM.replace("scale", "factor").replace("batch", "step").replace("query", "key, query")
    )
    assert faults(changed).count("ours/ours.py: ") == 3


def test_the_command_prints_what_is_broken_and_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["vllm_contract", str(tmp_path)])
    with pytest.raises(SystemExit):
        command.main()
    assert f"{tmp_path}: " in capsys.readouterr().err
    (tmp_path / "vllm/engine").mkdir(parents=True)
    (tmp_path / "vllm/_version.py").write_text("__version__ = version = '9.9.9'")
    (tmp_path / "vllm/engine/arg_utils.py").write_text("class EngineArgs:\n    new: int = 0\n")
    broken: list[str] = []
    monkeypatch.setattr(command, "changes", lambda *_: broken)
    monkeypatch.setattr(command, "type_faults", lambda *_: Counter({"a.py: as before": 1}))
    assert command.main() == 0
    broken.append("vllm.config has no VllmConfig")
    assert command.main() == 1
    said = capsys.readouterr()
    assert said.out == f"{broken[0]}\n"
    assert "vLLM 9.9.9: 1 broken" in said.err
    assert f"new engine options since {INSTALLED.version}: new\n" in said.err

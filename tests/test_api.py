"""The public names of vllm_gac: lazily imported, documented, and their examples run."""

import doctest
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import vllm_gac
from tests.importers.low_rank_models import write_low_rank
from tests.support.dense_models import config, write, write_text

_HEAVY = ("torch", "pydantic", "numpy", "vllm", "transformers")


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = f"import vllm_gac, sys; print(*set({_HEAVY}) & set(sys.modules), sep=',')"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout == "\n"


def test_every_public_name_is_there_and_listed() -> None:
    assert set(vllm_gac.__all__) <= set(dir(vllm_gac))
    for name in vllm_gac.__all__:
        assert getattr(vllm_gac, name).__name__ == name
    with pytest.raises(AttributeError, match="'vllm_gac' has no attribute 'nothing'"):
        vllm_gac.nothing  # noqa: B018


def test_no_public_name_is_a_module_which_importing_would_put_in_its_place() -> None:
    for name in vllm_gac.__all__:
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(f"vllm_gac.{name}")


@pytest.mark.parametrize("name", vllm_gac.__all__)
def test_the_example_of_its_docstring(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "llama", config(intermediate_size=93))
    write_text(tmp_path / "text.txt")
    write_low_rank(tmp_path / "svd-llm", "svd-llm")
    monkeypatch.chdir(tmp_path)
    examples = doctest.DocTestFinder(recurse=False).find(getattr(vllm_gac, name), name, globs={})
    assert [len(example.examples) > 1 for example in examples] == [True]
    said: list[str] = []
    result = doctest.DocTestRunner(verbose=False).run(examples[0], out=said.append)
    assert result.failed == 0, "".join(said)


def test_files_and_directories_may_be_named_by_strings(tmp_path: Path) -> None:
    """heal: tests/steps/heal/test_heal.py."""
    model = str(write(tmp_path / "llama", config(intermediate_size=93)))
    text = str(write_text(tmp_path / "text.txt"))
    low_rank, _ = write_low_rank(tmp_path / "low rank", "svd-llm")
    stats, first, second, repaired, imported = (
        str(tmp_path / name) for name in ("stats", "first", "second", "repaired", "imported")
    )
    request = vllm_gac.PlanRequest(param_ratio=0.9)
    vllm_gac.calibrate(
        model, [text], stats, vllm_gac.CalibrateRequest(max_tokens=512), progress=False
    )
    vllm_gac.compress(model, first, request, stats=stats, progress=False)
    vllm_gac.compress(model, second, f"{first}/plan.json", stats=stats, progress=False)
    vllm_gac.repair(first, repaired, progress=False)
    vllm_gac.import_model(str(low_rank), imported, progress=False)
    for directory in (first, second, repaired, imported):
        assert vllm_gac.verify(directory).faults == []
    planned = vllm_gac.plan(model, request, stats).layers
    assert planned == vllm_gac.plan(model, request, Path(stats)).layers

"""The public names of vllm_gac: lazily imported, documented, and their examples run."""

import doctest
import importlib
from pathlib import Path

import pytest

import vllm_gac
from tests.importers.low_rank_models import write_low_rank
from tests.support.dense_models import config, write, write_text


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


def test_plans_and_statistics_may_be_named_by_strings(tmp_path: Path) -> None:
    """All else that may be is in the examples."""
    write(tmp_path / "llama", config(intermediate_size=93))
    text = write_text(tmp_path / "text.txt")
    model, stats, first, second = (str(tmp_path / name) for name in ("llama", "stats", "1", "2"))
    few = vllm_gac.CalibrateRequest(max_tokens=512)
    vllm_gac.calibrate(model, [text], stats, few, progress=False)
    request = vllm_gac.PlanRequest(param_ratio=0.9)
    vllm_gac.compress(model, first, request, stats=stats, progress=False)
    vllm_gac.compress(model, second, f"{first}/plan.json", stats=stats, progress=False)
    assert vllm_gac.verify(second).ok

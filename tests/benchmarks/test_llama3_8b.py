"""Models without weights have the planned dims, or slightly larger ones."""

import shlex
from pathlib import Path

import pytest

import loadtest
from benchmarks.common.llama3_8b import DENSE, write_models

pytest.importorskip("matplotlib")

from loadtest.ab.comparison_file import load_comparison
from vllm_gac.layout.dims import ModelLayout

# The directory of the models, and their layouts.
Written = tuple[Path, dict[str, ModelLayout]]
COMPARISON = Path(loadtest.__file__).parent / "comparisons" / "misaligned.yaml"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    directory = tmp_path_factory.mktemp("models")
    return directory, write_models(directory)


def test_the_plan_keeps_its_budgets_and_the_misaligned_one_is_just_past_it(
    written: Written,
) -> None:
    directory, models = written
    dense, gac, misaligned = models["dense"], models["gac"], models["misaligned"]
    assert gac.parameters <= 0.8 * dense.parameters
    assert gac.kv_elements <= 0.75 * dense.kv_elements
    for planned, past in zip(gac.layers, misaligned.layers, strict=True):
        assert planned.key.size % 8 == planned.value.size % 8 == planned.intermediate_size % 8 == 0
        assert past.key.size - planned.key.size == 2  # rotary keys are pairs
        assert past.value.size - planned.value.size == 1
        assert past.intermediate_size - planned.intermediate_size == 1
    for made in directory.iterdir():
        assert {f.name for f in made.iterdir()} == {
            "config.json",
            "tokenizer.json",
            "tokenizer_config.json",
        }


def test_every_token_is_a_text(written: Written) -> None:
    from tokenizers import Tokenizer

    directory, _ = written
    tokenizer = Tokenizer.from_file(str(directory / "gac" / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == DENSE["vocab_size"]
    assert tokenizer.decode([4096, DENSE["vocab_size"] - 1]) == "<4096><128255>"


def test_the_comparison_names_these_models(written: Written) -> None:
    _, models = written
    for server in load_comparison(COMPARISON).servers:
        command = shlex.split(server.command or "")
        assert command[:2] == ["vllm", "serve"]
        assert command[2].removeprefix("build/llama3-8b/") in models
        assert any("dummy" in word for word in command)

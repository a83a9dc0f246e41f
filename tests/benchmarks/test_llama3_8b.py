"""Models without weights have the planned dims, or slightly larger ones."""

import shlex
from pathlib import Path

import pytest

import loadtest
from benchmarks.common.llama3_8b import DENSE, ideals, write_models

pytest.importorskip("matplotlib")

from loadtest.ab.comparison_file import load_comparison
from loadtest.report.comparison import parse_ideals
from vllm_gac.layout.dims import ModelLayout

# The directory of the models, and their layouts.
Written = tuple[Path, dict[str, ModelLayout]]
COMPARISON = Path(loadtest.__file__).parent / "comparisons" / "h200-8b.yaml"


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


def test_the_comparison_names_these_models_and_their_ideals(written: Written) -> None:
    comparison = load_comparison(COMPARISON)
    _, models = written
    assert {server.label for server in comparison.servers} == set(models)
    for server in comparison.servers:
        command = shlex.split(server.command)
        assert command[:3] == ["vllm", "serve", f"build/llama3-8b/{server.label}"]
        assert any("dummy" in word for word in command)
    given = parse_ideals(comparison.ideal)
    assert len(given) == 4
    for (label, phase), ratio in given.items():
        assert ratio == pytest.approx(ideals(models["dense"], models[label])[phase], abs=0.0006)

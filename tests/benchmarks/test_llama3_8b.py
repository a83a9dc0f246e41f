"""Models without weights have the planned dims, or slightly larger ones."""

import shlex
from pathlib import Path

import pytest

import loadtest
from benchmarks.common.llama3_8b import DENSE, ideals, write_models

pytest.importorskip("matplotlib", reason="needs the extra `loadtest`")

from loadtest.ab.comparison_file import load_comparison
from loadtest.report.comparison import parse_ideals

COMPARISON = Path(loadtest.__file__).parent / "comparisons" / "h200-8b.yaml"


def test_the_plan_keeps_its_budgets_and_the_misaligned_one_is_just_past_it(tmp_path: Path) -> None:
    models = write_models(tmp_path)
    dense, gac, misaligned = models["dense"], models["gac"], models["misaligned"]
    assert gac.parameters <= 0.8 * dense.parameters
    assert gac.kv_elements <= 0.75 * dense.kv_elements
    for planned, past in zip(gac.layers, misaligned.layers, strict=True):
        assert planned.key.size % 8 == planned.value.size % 8 == planned.intermediate_size % 8 == 0
        assert past.key.size - planned.key.size == 2  # rotary keys are pairs
        assert past.value.size - planned.value.size == 1
        assert past.intermediate_size - planned.intermediate_size == 1
    for directory in tmp_path.iterdir():
        assert {f.name for f in directory.iterdir()} == {
            "config.json",
            "tokenizer.json",
            "tokenizer_config.json",
        }


def test_every_token_is_a_text(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    write_models(tmp_path)
    tokenizer = Tokenizer.from_file(str(tmp_path / "gac" / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == DENSE["vocab_size"]
    assert tokenizer.decode([4096, DENSE["vocab_size"] - 1]) == "<4096><128255>"


def test_the_comparison_names_these_models_and_their_ideals(tmp_path: Path) -> None:
    comparison = load_comparison(COMPARISON)
    models = write_models(tmp_path)
    assert {server.label for server in comparison.servers} == set(models)
    for server in comparison.servers:
        command = shlex.split(server.command)
        assert command[:3] == ["vllm", "serve", f"build/llama3-8b/{server.label}"]
        assert any("dummy" in word for word in command)
    given = parse_ideals(comparison.ideal)
    assert len(given) == 4
    for (label, phase), ratio in given.items():
        assert ratio == pytest.approx(ideals(models["dense"], models[label])[phase], abs=0.0006)

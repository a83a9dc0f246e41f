"""The ratio of two models' perplexities, and how far it can be trusted."""

import json
import math
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import vllm_gac
from tests.support.command import error, result
from tests.support.dense_models import config, write, write_text
from tests.support.stored_models import change_tensors, logits_of
from vllm_gac.cli import main
from vllm_gac.steps.evaluate import compare
from vllm_gac.texts import token_text
from vllm_gac.texts.tokenizer import ModelTokenizer


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models of one tokenizer, and text of 60 windows of 40 tokens and a short one."""
    directory = tmp_path_factory.mktemp("models")
    write(directory / "a", config())
    write(directory / "b", config(intermediate_size=93, max_position_embeddings=40))
    write_text(directory / "text", 2424)
    return directory


def test_compare_gives_the_ratio_of_what_evaluate_says_of_each(
    models: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = ("--text", models / "text", "--quiet")
    comparison = result(capsys, "evaluate", models / "a", "--against", models / "b", *text)
    first, second = (
        result(capsys, "evaluate", models / name, *text, "--sequence-length", 40) for name in "ab"
    )
    assert comparison["perplexity"] == pytest.approx(first["perplexity"])
    assert comparison["against"] == pytest.approx(second["perplexity"])
    assert comparison["tokens"] == first["tokens"] == first["by_text"][str(models / "text")]
    assert comparison["ratio"] == pytest.approx(first["perplexity"] / second["perplexity"])
    low, high = comparison["interval"]
    assert low < comparison["ratio"] < high
    back = vllm_gac.compare(models / "b", models / "a", [models / "text"])
    assert back.ratio == pytest.approx(1 / comparison["ratio"])
    assert back.interval == pytest.approx((1 / high, 1 / low))


def test_a_baseline_compares_as_compare_does(models: Path) -> None:
    baseline = compare.Baseline(models / "a", [models / "text"])
    for name in "aab":
        expected = vllm_gac.compare(models / name, models / "a", [models / "text"])
        assert baseline.compare(models / name) == expected


def test_divergence_and_agreement_are_those_of_the_logits(models: Path, tmp_path: Path) -> None:
    near = shutil.copytree(models / "a", tmp_path / "near")
    noise = torch.Generator().manual_seed(0)

    def add_noise(tensors: dict[str, torch.Tensor]) -> None:
        for tensor in tensors.values():
            tensor += 0.1 * tensor.std() * torch.randn(tensor.shape, generator=noise)

    change_tensors(near / "model.safetensors", add_noise)
    text = {"sequence_length": 40, "max_tokens": 400}
    comparison = vllm_gac.compare(near, models / "a", [models / "text"], **text)
    ((_, (tokens,)),) = token_text.windows(
        ModelTokenizer(near), [models / "text"], length=40, max_tokens=400
    )
    predicted = (logits_of(of, tokens)[:, :-1].double() for of in (near, models / "a"))
    mine, dense = (each.log_softmax(-1) for each in predicted)
    divergence = (dense.exp() * (dense - mine)).sum(-1).mean()
    assert comparison.divergence == pytest.approx(float(divergence), rel=1e-3)
    agreement = (mine.argmax(-1) == dense.argmax(-1)).float().mean()
    assert comparison.agreement == pytest.approx(float(agreement))
    assert 0 < comparison.agreement < 1
    alike = vllm_gac.compare(near, near, [models / "text"], **text)
    assert (alike.divergence, alike.agreement) == (0, 1)


def test_little_text_has_no_interval(models: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokens = ("--text", models / "text", "--quiet", "--sequence-length", 40, "--max-tokens")
    none = "too little text for an interval"
    for windows, said in ((1, none), (15, none), (16, "; 95 % interval ")):
        asked = ("evaluate", models / "a", "--against", models / "b", *tokens, 40 * windows)
        assert main([*map(str, asked)]) == 0
        first, second, _ = capsys.readouterr().out.splitlines()
        assert first.endswith(f"over {39 * windows:,} tokens")
        assert said in second


@pytest.mark.parametrize(
    "change",
    [
        lambda raw: raw["model"]["vocab"].update({"another token that the text has not": 128}),
        lambda raw: raw.update(
            normalizer={"type": "Replace", "pattern": {"String": "a"}, "content": "b"}
        ),
    ],
)
def test_another_tokenizer_is_refused(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Any
) -> None:
    other = shutil.copytree(models / "b", tmp_path / "b")
    raw = json.loads((other / "tokenizer.json").read_text())
    change(raw)
    (other / "tokenizer.json").write_text(json.dumps(raw))
    said = error(
        capsys, "evaluate", models / "a", "--against", other, "--text", models / "text", "--quiet"
    )
    assert said.startswith(f"{other}: its tokenizer is not that of {models / 'a'}")


def test_an_interval_is_of_documents_and_holds_the_ratio() -> None:
    rng = random.Random(0)
    document = [n // 3 for n in range(90)]
    dense = [rng.gauss(2, 1) for _ in document]
    shifts = [rng.gauss(0.05, 0.02) for _ in range(30)]
    losses = [loss + shifts[d] for loss, d in zip(dense, document, strict=True)]
    low, high = compare.ratio_interval(losses, dense, document, [1] * 90)
    assert low < math.exp(sum(shifts) / 30) < high
    # The error of the mean of 30 documents, not that of 90 windows.
    assert math.log(high / low) == pytest.approx(2 * 1.96 * 0.02 / 30**0.5, rel=0.3)
    assert compare.ratio_interval(dense, dense, document, [1] * 90) == (1, 1)
    doubled = [[2 * loss for loss in each] for each in (losses, dense)]
    assert compare.ratio_interval(*doubled, document, [2] * 90) == pytest.approx((low, high))

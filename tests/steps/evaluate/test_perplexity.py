"""Perplexity agrees with its definition, and rises as the demo model is compressed further."""

import json
import math
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from tests.support.dense_models import config, write, write_text
from vllm_gac import demo
from vllm_gac.checkpoint.open import open_checkpoint
from vllm_gac.cli import main
from vllm_gac.compression.reference_model import logits, reference
from vllm_gac.errors import CheckpointError
from vllm_gac.planning.request import PlanRequest
from vllm_gac.steps.calibrate.calibrate import calibrate
from vllm_gac.steps.calibrate.request import CalibrateRequest
from vllm_gac.steps.compress.compress import compress
from vllm_gac.steps.evaluate.perplexity import evaluate
from vllm_gac.texts.token_text import windows


def test_is_the_exponential_of_the_mean_cross_entropy(tmp_path: Path) -> None:
    model = write(tmp_path / "model", config())
    text = write_text(tmp_path / "text", 1234)
    got, tokens, by_text = evaluate(model, [text], sequence_length=100)
    checkpoint = open_checkpoint(model)
    losses = []
    ((_, parts),) = windows(model, [text], length=100, max_tokens=None)
    for part in parts:
        with checkpoint.reader() as read:
            logprobs = logits(reference(checkpoint), read, part).log_softmax(-1)
        losses += [-logprobs[i, t, part[i, t + 1]] for i, t in _positions(part)]
    assert tokens == len(losses) == 1234 - 13
    assert by_text == {str(text): tokens}
    assert got == pytest.approx(math.exp(torch.stack(losses).mean().item()), rel=1e-5)


def _positions(part: torch.Tensor) -> list[tuple[int, int]]:
    return [(i, t) for i in range(part.shape[0]) for t in range(part.shape[1] - 1)]


def test_max_tokens_are_taken_of_all_texts_alike_in_any_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write(tmp_path / "model", config())
    texts = [str(write_text(tmp_path / name, size)) for name, size in (("a", 300), ("b", 900))]
    arguments = ["--sequence-length", "100", "--max-tokens", "350", "--device", "cpu", "--json"]
    found = []
    for order in (texts, texts[::-1]):
        assert main(["evaluate", str(model), "--text", *order, *arguments]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0]["by_text"] == found[1]["by_text"] == dict.fromkeys(texts, 99 + 74)
    assert found[0]["perplexity"] == pytest.approx(found[1]["perplexity"])


def test_a_model_that_does_not_fit_its_config_is_refused(tmp_path: Path) -> None:
    model = write(tmp_path / "model", config())
    raw = (model / "config.json").read_text()
    (model / "config.json").write_text(
        raw.replace('"num_hidden_layers": 2', '"num_hidden_layers": 3')
    )
    with pytest.raises(CheckpointError, match=r"layers\.2\.input_layernorm\.weight: missing"):
        evaluate(model, [write_text(tmp_path / "text")])


@pytest.mark.slow
class TestDemo:
    """Tests on the trained demo model."""

    WINDOWS: ClassVar[dict[str, Any]] = {"sequence_length": 512, "max_tokens": 12 * 512}

    @pytest.fixture(scope="class")
    @staticmethod
    def stats(tmp_path_factory: pytest.TempPathFactory) -> Path:
        out = tmp_path_factory.mktemp("demo") / "stats.safetensors"
        request = CalibrateRequest(PlanRequest().methods, max_tokens=1 << 13)
        calibrate(demo.MODEL, [demo.CALIBRATION], out, request, progress=False)
        return out

    @pytest.fixture(scope="class")
    @staticmethod
    def dense() -> float:
        return evaluate(demo.MODEL, [demo.HELD_OUT], **TestDemo.WINDOWS)[0]

    def test_perplexity_grows_as_the_ratios_fall(
        self, stats: Path, dense: float, tmp_path: Path
    ) -> None:
        perplexities = [dense]
        for params, kv in ((0.9, 0.75), (0.8, 0.5), (0.65, 0.375)):
            out = tmp_path / f"{params}-{kv}"
            asked = PlanRequest(param_ratio=params, kv_ratio=kv)
            compress(demo.MODEL, out, asked, stats=stats, progress=False)
            perplexities.append(evaluate(out, [demo.HELD_OUT], **self.WINDOWS)[0])
        assert perplexities == sorted(perplexities)
        assert perplexities[-1] < 2 * dense

    def test_what_make_serve_serves_is_close_to_the_dense_model(
        self, compressed_demo: Path, dense: float
    ) -> None:
        got = evaluate(compressed_demo, [demo.HELD_OUT], **self.WINDOWS)
        assert dense < 11
        assert dense < got.perplexity < 1.1 * dense  # 1.25 is required, 1.03 was measured

    def test_latent_keys_lose_less_than_rotary_ones_where_much_is_taken(
        self, stats: Path, dense: float, tmp_path: Path
    ) -> None:
        loss = {}
        for form in ("latent", "rotary"):
            out = tmp_path / form
            asked = PlanRequest(kv_ratio=0.375, methods=["heads"], key_form=form)
            compress(demo.MODEL, out, asked, stats=stats, progress=False)
            loss[form] = math.log(evaluate(out, [demo.HELD_OUT], **self.WINDOWS)[0] / dense)
        assert 0 < 2 * loss["latent"] < loss["rotary"]

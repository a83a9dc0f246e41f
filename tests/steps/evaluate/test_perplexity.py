"""Perplexity agrees with its definition and with the served model's, and rises with compression."""

import json
import math
from pathlib import Path

import pytest
import torch

from tests.support.command import command
from tests.support.dense_models import config, write, write_text
from tests.support.stored_models import change_tensors, logits_of
from vllm_gac import demo
from vllm_gac.planning.request import PlanRequest
from vllm_gac.steps.compress.compress import compress
from vllm_gac.steps.evaluate.perplexity import evaluate
from vllm_gac.steps.verify import verify
from vllm_gac.texts.token_text import windows
from vllm_gac.texts.tokenizer import ModelTokenizer


def test_perplexity_is_the_exponential_of_the_mean_cross_entropy(tmp_path: Path) -> None:
    model = write(tmp_path / "model", config())
    text = write_text(tmp_path / "text", 1234)
    got, tokens, by_text = evaluate(model, [text], sequence_length=100)
    losses = []
    ((_, parts),) = windows(ModelTokenizer(model), [text], length=100, max_tokens=None)
    for part in parts:
        logprobs = logits_of(model, part).log_softmax(-1)
        losses.append(-logprobs[:, :-1].gather(-1, part[:, 1:, None]).flatten())
    assert tokens == len(torch.cat(losses)) == 1234 - 13
    assert by_text == {str(text): tokens}
    assert got == pytest.approx(math.exp(torch.cat(losses).mean().item()), rel=1e-5)


@pytest.mark.parametrize(
    ("dtype", "scales"),
    [
        ("float16", {"mlp.up_proj": 1e4, "mlp.down_proj": 1e4}),
        ("half", {"self_attn.v_proj": 4e4, "self_attn.o_proj": 1e-5}),  # only within the layer
    ],
)
def test_float16_overflow_is_logged(
    dtype: str, scales: dict[str, float], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    raw = config(dtype=dtype)
    model, text = write(tmp_path / "model", raw), write_text(tmp_path / "text", 300)
    evaluate(model, [text], sequence_length=100)
    assert caplog.messages == []
    path = model / "model.safetensors"
    change_tensors(
        path, lambda t: [t[f"model.layers.0.{n}.weight"].mul_(by) for n, by in scales.items()]
    )
    evaluate(model, [text], sequence_length=100)
    (said,) = caplog.messages
    assert "float16" in said
    change_tensors(path, lambda t: t.update({name: t[name].bfloat16() for name in t}))
    verify(model)
    assert str(model / "config.json") in caplog.messages[-1]


@pytest.mark.slow
def test_the_demo_loses_little_as_served_and_more_as_the_ratios_fall(
    compressed_demo: Path, demo_statistics: Path, tmp_path: Path
) -> None:
    asked = PlanRequest(param_ratio=0.65, kv_ratio=0.375)
    compress(demo.MODEL, tmp_path / "s", asked, stats=demo_statistics, progress=False)
    dense, served, small = (
        evaluate(model, [demo.HELD_OUT], sequence_length=512, max_tokens=12 * 512).perplexity
        for model in (demo.MODEL, compressed_demo, tmp_path / "s")
    )
    assert dense < 11
    assert dense < served < 1.05 * dense < small < 2 * dense  # served: 1.013 was measured


# The demo model's whole context. vLLM asks for one token more. The prefill takes two steps.
LENGTH, TOKENS = 2048, 4096


@pytest.mark.slow
def test_vllm_in_process_agrees_with_the_reference(compressed_demo: Path) -> None:
    arguments = ("--text", demo.HELD_OUT, "--sequence-length", LENGTH, "--max-tokens", TOKENS)
    done = command("evaluate", compressed_demo, *arguments, "--engine", "vllm", "--json")
    assert done.returncode == 0, done.stderr
    (line,) = done.stdout.splitlines()
    expected, tokens, _ = evaluate(
        compressed_demo, [demo.HELD_OUT], sequence_length=LENGTH, max_tokens=TOKENS
    )
    served = json.loads(line)
    assert served["tokens"] == tokens == 2 * (LENGTH - 1)
    assert served["perplexity"] == pytest.approx(expected, rel=0.005)

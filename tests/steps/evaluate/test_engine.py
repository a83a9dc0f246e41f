"""The perplexity of the served model is that of the reference model, within half a percent."""

import json
from pathlib import Path

import pytest

from tests.support.command import command
from vllm_gac import demo
from vllm_gac.steps.evaluate.perplexity import evaluate

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

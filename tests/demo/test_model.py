"""The shipped demo model reaches the numbers of its card."""

import re

import pytest

from vllm_gac.checkpoint.open import open_checkpoint
from vllm_gac.checkpoint.values import all_faults
from vllm_gac.demo import HELD_OUT, MODEL
from vllm_gac.steps.evaluate.perplexity import evaluate

MEGABYTE = 1_000_000


def test_every_tensor_fits_the_layout_and_is_finite() -> None:
    checkpoint = open_checkpoint(MODEL)
    assert list(all_faults(checkpoint)) == []
    assert checkpoint.raw_config["architectures"] == ["LlamaForCausalLM"]
    assert {info.dtype for info in checkpoint.tensors.values()} == {"BF16"}
    assert checkpoint.layout.parameters == pytest.approx(11.0e6, rel=0.01)
    assert (MODEL / "model.safetensors").stat().st_size < 25 * MEGABYTE


@pytest.mark.slow
def test_held_out_perplexity_is_what_the_card_says() -> None:
    card = (MODEL / "README.md").read_text()
    stated = re.search(r"of the first 16 windows alone \| ([\d.]+) \|", card)
    assert stated is not None
    evaluated = evaluate(MODEL, [HELD_OUT], sequence_length=1024, max_tokens=16 * 1024)
    assert evaluated.perplexity == pytest.approx(float(stated[1]), rel=0.01)

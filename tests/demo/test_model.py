"""The shipped demo model reaches the numbers of its card."""

import ast
import re
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from vllm_gac.checkpoint.open import faults, open_checkpoint
from vllm_gac.demo import CALIBRATION, HELD_OUT, MODEL
from vllm_gac.steps.evaluate.perplexity import evaluate

MEGABYTE = 1_000_000


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(MODEL)


def completion(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, prompt: str) -> str:
    ids = tokenizer(prompt, return_tensors="pt")
    output = model.generate(**ids, max_new_tokens=40, do_sample=False, top_p=None, temperature=None)
    return tokenizer.decode(output[0], skip_special_tokens=True)


def test_every_tensor_fits_the_layout_and_is_finite() -> None:
    checkpoint = open_checkpoint(MODEL)
    assert list(faults(checkpoint, finite=True)) == []
    assert checkpoint.raw_config["architectures"] == ["LlamaForCausalLM"]
    assert {info.dtype for info in checkpoint.tensors.values()} == {"BF16"}
    assert checkpoint.layout.parameters == pytest.approx(11.0e6, rel=0.01)
    assert (MODEL / "model.safetensors").stat().st_size < 25 * MEGABYTE


def test_transformers_loads_it_without_missing_or_unexpected_weights() -> None:
    model, loading = LlamaForCausalLM.from_pretrained(
        MODEL, dtype=torch.float32, output_loading_info=True
    )
    assert isinstance(model, LlamaForCausalLM)
    assert not any(loading.values())


@pytest.mark.slow
def test_held_out_perplexity_is_what_the_card_says() -> None:
    card = (MODEL / "README.md").read_text()
    stated = re.search(r"of the first 16 windows alone \| ([\d.]+) \|", card)
    assert stated is not None
    evaluated = evaluate(MODEL, [HELD_OUT], sequence_length=1024, max_tokens=16 * 1024)
    assert evaluated.perplexity == pytest.approx(float(stated[1]), rel=0.01)


def test_a_method_is_continued_with_its_arguments_and_attributes(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast
) -> None:
    assert "self." in completion(model, tokenizer, "def __init__(self")


def test_the_body_of_a_class_is_continued_with_python_that_parses(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast
) -> None:
    text = completion(model, tokenizer, "# Lib/stack.py\nclass Stack:\n    def __init__(self):\n")
    whole_lines = text[: text.rindex("\n")]
    assert whole_lines.count("\n") > 3
    ast.parse(whole_lines)


@pytest.mark.parametrize("path", [CALIBRATION, HELD_OUT], ids=lambda path: path.name)
def test_sources_survive_and_take_about_a_token_per_three_bytes(
    path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    text = path.read_text(encoding="utf-8")[:50_000]
    begin, *ids = tokenizer(text).input_ids
    assert begin == tokenizer.bos_token_id
    assert tokenizer.decode(ids) == text
    assert 2.5 < len(text) / len(ids) < 4.5


def test_a_chat_becomes_a_module_that_starts_with_a_docstring(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "A stack."},
        {"role": "assistant", "content": "class Stack: pass"},
        {"role": "user", "content": "A queue.\n"},
    ]
    assert tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == (
        f'{tokenizer.bos_token}# Lib/__main__.py\n"""Be brief.\n"""\n\n"""A stack.\n"""\n\n'
        'class Stack: pass\n\n"""A queue.\n"""\n\n'
    )

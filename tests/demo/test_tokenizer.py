"""The shipped tokenizer, loaded by AutoTokenizer."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tools.demo_model.tokenizer import BOS, BOS_ID, EOS, EOS_ID, VOCAB_SIZE
from vllm_gac.demo import CALIBRATION, HELD_OUT, MODEL

TOKENIZER = AutoTokenizer.from_pretrained(MODEL)


def test_it_is_fast_and_has_the_vocabulary_of_the_model(tokenizer: PreTrainedTokenizerFast) -> None:
    assert tokenizer.is_fast
    assert len(tokenizer) == tokenizer.vocab_size == VOCAB_SIZE
    assert (tokenizer.bos_token, tokenizer.bos_token_id) == (BOS, BOS_ID)
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == (EOS, EOS_ID)


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=200))
def test_any_text_survives_encoding_and_decoding(text: str) -> None:
    ids = TOKENIZER(text, add_special_tokens=False).input_ids
    assert all(0 <= i < VOCAB_SIZE for i in ids)
    assert TOKENIZER.decode(ids) == text


@pytest.mark.parametrize("path", [CALIBRATION, HELD_OUT], ids=lambda path: path.name)
def test_sources_survive_and_take_about_a_token_per_three_bytes(
    path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    text = path.read_text(encoding="utf-8")[:50_000]
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert tokenizer.decode(ids) == text
    assert 2.5 < len(text) / len(ids) < 4.5


def test_a_prompt_begins_with_the_begin_token(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = tokenizer("import os").input_ids
    assert ids[0] == BOS_ID
    assert BOS_ID not in ids[1:]


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
        f'{BOS}# Lib/__main__.py\n"""Be brief.\n"""\n\n"""A stack.\n"""\n\nclass Stack: pass\n\n'
        '"""A queue.\n"""\n\n'
    )

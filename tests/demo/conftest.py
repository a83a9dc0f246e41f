"""Loads the shipped tokenizer once."""

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from vllm_gac.demo import MODEL


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(MODEL)

"""The training model equals transformers' Llama, and the validation loss is a mean over tokens."""

import math

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tools.demo_model.llama import Architecture, Llama
from tools.demo_model.training import validation_loss

TINY = Architecture(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=64,
    max_position_embeddings=1024,
)


def test_logits_equal_those_of_transformers() -> None:
    torch.manual_seed(0)
    ours = Llama(TINY, dropout=0.5).eval()
    config = {key: value for key, value in TINY.hf_config().items() if key != "dtype"}
    theirs = LlamaForCausalLM(LlamaConfig(**config)).eval()
    loading = theirs.load_state_dict(ours.state_dict(), strict=False)
    assert loading.missing_keys == ["lm_head.weight"]  # tied
    assert not loading.unexpected_keys
    ids = torch.randint(TINY.vocab_size, (2, 100))
    torch.testing.assert_close(ours(ids), theirs(ids).logits, atol=1e-5, rtol=1e-4)


def test_the_default_architecture_has_11_million_parameters() -> None:
    model = Llama(Architecture(), dropout=0.0)
    assert sum(p.numel() for p in model.parameters()) == 11_013_504


def test_the_validation_loss_of_uniform_logits_is_that_of_the_vocabulary() -> None:
    model = Llama(TINY, dropout=0.5)
    torch.nn.init.zeros_(model.model.norm.weight)
    tokens = torch.randint(TINY.vocab_size, (9 * 1024 + 7,), dtype=torch.int16)
    assert validation_loss(model, tokens) == pytest.approx(math.log(TINY.vocab_size))
    assert model.training

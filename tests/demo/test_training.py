"""The training model equals transformers' Llama, the loop learns, and the command fails clearly."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from tools.demo_model.llama import Architecture, Llama
from tools.demo_model.perplexity import perplexity
from tools.demo_model.train import main
from tools.demo_model.training import Schedule, train
from vllm_gac.errors import GacError

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
SCHEDULE = Schedule(
    epochs=20, minutes=600, batch=4, length=32, lr=1e-2, weight_decay=0.1, dropout=0.0, seed=0
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


@pytest.mark.slow
def test_training_learns_a_repeating_stream_and_keeps_its_best_weights() -> None:
    torch.manual_seed(0)
    tokens = torch.arange(2, 42, dtype=torch.int16).repeat(64)
    validation = tokens[:2048]
    model = Llama(TINY, dropout=0.0)
    history = train(model, tokens, validation, SCHEDULE)
    assert history.curve[0].train_loss < 3.0
    assert history.curve[-1].train_loss < 0.3
    assert history.best == min(history.curve, key=lambda e: e.validation_loss)
    with torch.autocast("cpu", torch.bfloat16):
        kept = perplexity(model.eval(), validation, 1024)
    assert kept == pytest.approx(torch.tensor(history.best.validation_loss).exp().item(), rel=1e-3)


@pytest.mark.slow
def test_two_runs_of_the_same_seed_are_the_same() -> None:
    tokens = torch.arange(2, 42, dtype=torch.int16).repeat(30)

    def trained() -> dict[str, Tensor]:
        torch.manual_seed(1)
        model = Llama(TINY, dropout=0.1)
        train(model, tokens, tokens, replace(SCHEDULE, epochs=1))
        return model.state_dict()

    one, other = trained(), trained()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_minutes_end_the_schedule_before_the_epochs_do() -> None:
    tokens = torch.arange(2, 42, dtype=torch.int16).repeat(30)
    schedule = replace(SCHEDULE, epochs=1000, minutes=0.01)
    history = train(Llama(TINY, dropout=0.0), tokens, tokens, schedule)
    assert history.steps < 1000 * (len(tokens) // 32 // 4)
    assert history.curve[-1].step == history.steps


def test_a_corpus_too_small_for_a_batch_is_an_error() -> None:
    with pytest.raises(GacError, match="make no step"):
        train(Llama(TINY, 0.0), torch.zeros(100, dtype=torch.int16), torch.zeros(100), SCHEDULE)


def test_perplexity_of_uniform_logits_is_the_vocabulary_size() -> None:
    tokens = torch.randint(50, (333,))
    measured = perplexity(lambda ids: torch.zeros(*ids.shape, 50), tokens, window=32, batch=3)
    assert measured == pytest.approx(50)


def test_the_command_refuses_to_overwrite(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--out", str(tmp_path)]) == 1
    assert capsys.readouterr().err == (
        f"error: {tmp_path}: exists already; remove it or write elsewhere\n"
    )

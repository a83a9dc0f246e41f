"""Embedding and classifying with a gac model."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.serving.agreement import PROMPTS
from tests.serving.engines import OPTIONS, in_engine_process
from tests.serving.models import HETEROGENEOUS, write_model
from vllm_gac.checkpoint.open import open_checkpoint
from vllm_gac.compression.reference_model import logits, reference

pytestmark = pytest.mark.slow

BY_TOKENS = {"method": "from_2_way_softmax", "classifier_from_token": ["!", "a"]}


def test_embeddings_and_classification_match_the_reference(tmp_path: Path) -> None:
    write_model(tmp_path / "model", HETEROGENEOUS[:6])
    checkpoint = open_checkpoint(tmp_path / "model")
    model = reference(checkpoint)
    with checkpoint.reader() as read, torch.inference_mode():
        expected = [logits(model, read, torch.tensor([prompt]))[0, -1] for prompt in PROMPTS]
        unembedding = read("lm_head.weight").float()
    embeddings, ((no, yes), scores) = in_engine_process(_pooled, str(tmp_path / "model"))
    for last, score, embedding in zip(expected, scores, embeddings, strict=True):
        assert score == pytest.approx(float((last[yes] - last[no]).sigmoid()), abs=1e-4)
        again = unembedding @ torch.tensor(embedding)  # normalized, so only its length differs
        assert torch.cosine_similarity(again, last, dim=0) > 1 - 1e-5


def _pooled(directory: str) -> Any:
    """Embeddings; two tokens, and for each prompt the probability of the second."""
    from vllm import LLM

    prompts: list[Any] = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    llm = LLM(directory, runner="pooling", **OPTIONS)
    embeddings = [output.outputs.embedding for output in llm.embed(prompts, use_tqdm=False)]
    del llm
    llm = LLM(directory, convert="classify", hf_overrides=BY_TOKENS, **OPTIONS)
    tokens = llm.get_tokenizer().convert_tokens_to_ids(BY_TOKENS["classifier_from_token"])
    scores = [output.outputs.probs[0] for output in llm.classify(prompts, use_tqdm=False)]
    return embeddings, (tokens, scores)

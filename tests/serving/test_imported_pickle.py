"""Pickles of SVD-LLM and LLM-Pruner, imported and served by vLLM."""

from functools import partial
from pathlib import Path

import pytest
from torch import nn

from tests.checkpoint.pickles import foreign
from tests.importers.pickled_models import llm_pruner, saved, svd_llm
from tests.importers.test_pickles import expected_logits
from tests.serving.agreement import assert_agrees
from tests.serving.engines import each_in_engine_process, served
from tests.serving.models import copy_tokenizer
from tests.support.command import result

# Sizes that vLLM's CPU kernels support.
SIZES = {"hidden_size": 128, "vocab_size": 4096, "max_position_embeddings": 1024}


def factorized() -> nn.Module:
    return svd_llm(mistral=True, hidden=128, head_dim=32, **SIZES)


def pruned() -> nn.Module:
    layers = [
        foreign.dims(hidden=128, head_dim=32),
        foreign.dims(hidden=128, head_dim=32, heads=2, kv_heads=2, width=61),
    ]
    return llm_pruner(layers, **SIZES)


@pytest.mark.slow
def test_served_logprobs_match_the_original(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models = {tmp_path / "factorized": factorized(), tmp_path / "pruned": pruned()}
    for directory, model in models.items():
        directory.mkdir()
        result(capsys, "import", saved(directory, model), directory / "out", "--quiet")
        (directory / "out" / "tokenizer.model").unlink()  # a dummy
        copy_tokenizer(directory / "out")
    found = each_in_engine_process(served, [[str(directory / "out")] for directory in models])
    for (directory, model), (answers, *_) in zip(models.items(), found, strict=True):
        assert_agrees(answers, partial(expected_logits, model), directory)

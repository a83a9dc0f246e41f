"""Pickles of SVD-LLM and LLM-Pruner, imported and served by `vllm serve`."""

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.checkpoint.pickles import foreign
from tests.importers.pickled_models import llm_pruner, saved, svd_llm
from tests.importers.test_pickles import expected_logits
from tests.serving.server import serve
from tests.serving.test_imported import assert_logprobs
from tests.support.command import result
from vllm_gac import demo

# Sizes that vLLM's CPU kernels support.
SIZES = {"hidden_size": 128, "vocab_size": 4096, "max_position_embeddings": 1024}


class Original(nn.Module):
    """The tool's model in fp32, with the call of a transformers model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=expected_logits(self.model, tokens))


def factorized() -> nn.Module:
    return svd_llm(mistral=True, hidden=128, head_dim=32, **SIZES)


def pruned() -> nn.Module:
    layers = [
        foreign.dims(hidden=128, head_dim=32),
        foreign.dims(hidden=128, head_dim=32, heads=2, kv_heads=2, width=61),
    ]
    return llm_pruner(layers, **SIZES)


@pytest.mark.slow
@pytest.mark.parametrize("made", [factorized, pruned])
def test_served_logprobs_match_the_original(
    made: Callable[[], nn.Module], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out = made(), tmp_path / "out"
    result(capsys, "import", saved(tmp_path, model), out, "--quiet")
    (out / "tokenizer.model").unlink()  # a dummy
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo.MODEL / name, out)
    with serve(out, tmp_path / "log", "--load-format", "gac", "--dtype", "float32") as server:
        assert_logprobs(server, Original(model))

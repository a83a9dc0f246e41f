"""Prompts in CUDA graphs: attention must read this step's batch, not the captured one."""

from pathlib import Path

import pytest

from tests.serving.engines import GPU_OPTIONS, Answers, answers, in_engine_process
from tests.serving.models import HETEROGENEOUS, write_model

SIZES = [1, 2, 4, 8, 32, 96]
PROMPTS = [
    [(7 * i + j * j) % 4000 + 5 for j in range(length)] for i, length in enumerate(range(3, 93, 11))
]


@pytest.mark.gpu
def test_cuda_graphs_match_eager_mode(tmp_path: Path) -> None:
    """The worker is forked, as in an offline engine."""
    write_model(tmp_path / "model", HETEROGENEOUS)
    forked = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_WORKER_MULTIPROC_METHOD": "fork"}
    captured, eager = (
        in_engine_process(_first_tokens, str(tmp_path / "model"), enforce_eager, **forked)
        for enforce_eager in (False, True)
    )
    assert len(captured) == len(eager) == 2 * len(PROMPTS)
    for (_, [actual]), (_, [expected]) in zip(captured, eager, strict=True):
        both = actual.keys() & expected.keys()
        assert len(both) >= 4
        assert all(abs(actual[token] - expected[token]) < 0.1 for token in both)


def _first_tokens(model: str, enforce_eager: bool) -> Answers:
    """First tokens of every prompt alone, then of all prompts in one batch."""
    from vllm import LLM

    sizes = {"compilation_config": {"cudagraph_capture_sizes": SIZES}}
    options = GPU_OPTIONS | sizes | {"enforce_eager": enforce_eager, "enable_prefix_caching": False}
    llm = LLM(model, **options)
    alone = [answers(llm, [prompt], tokens=1)[0] for prompt in PROMPTS]
    return alone + answers(llm, PROMPTS, tokens=1)

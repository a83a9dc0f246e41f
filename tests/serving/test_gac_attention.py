"""Models that nobody compressed, with our attention instead of vLLM's."""

from pathlib import Path
from typing import Any

import pytest

from tests.serving.agreement import PROMPTS, TIE, TOP_ERROR
from tests.serving.engines import (
    GPU_OPTIONS,
    OPTIONS,
    Answers,
    assert_same,
    described,
    in_engine_process,
)
from tests.serving.server import serve
from vllm_gac import demo
from vllm_gac.serving.registration import BACKENDS

# The loader is vLLM's own, prompts are cached and come in chunks, and so do graphs of many sizes.
DENSE = {"load_format": "auto", "enable_prefix_caching": True}
ON_GPU = GPU_OPTIONS | DENSE | {"compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8]}}
DRAFTED = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}


def _reference_answers(model: str, options: dict[str, Any]) -> dict[str, Any]:
    """The same on a CPU, where vLLM would not let users choose: our reference attends."""
    from vllm.platforms import current_platform

    path = BACKENDS["GAC_REFERENCE"]
    type(current_platform).get_attn_backend_cls = classmethod(lambda cls, *_, **__: path)
    return described(model, options)


@pytest.mark.slow
def test_reference_backend_matches_cpu_attention_in_a_dense_model(tmp_path: Path) -> None:
    """Geometry, cache and metadata follow from what vLLM's attention layer says alone."""
    options = OPTIONS | DENSE
    ours = in_engine_process(_reference_answers, str(demo.MODEL), options)
    stock = in_engine_process(described, str(demo.MODEL), options)
    assert ours["attention"] == ["GacReferenceImpl"]
    assert stock["attention"] == ["CPUAttentionBackendImpl"]
    for mine, theirs in zip(ours["answers"], stock["answers"], strict=True):
        assert_same(mine, theirs)


def _agree(actual: dict[str, Any], expected: dict[str, Any], top_error: float) -> None:
    """Answers and those of cached prompts agree."""
    for mine, theirs in zip(actual["answers"], expected["answers"], strict=True):
        _agree_on(mine, theirs, top_error)


def _agree_on(actual: Answers, expected: Answers, top_error: float) -> None:
    """Greedy tokens are the same up to a tie, and logprobs are close up to there."""
    for (tokens, top), (expected_tokens, expected_top) in zip(actual, expected, strict=True):
        for step, (token, expected_token) in enumerate(zip(tokens, expected_tokens, strict=True)):
            ours, theirs = top[step], expected_top[step]
            both = ours.keys() & theirs.keys()
            assert len(both) >= 3
            assert max(abs(ours[name] - theirs[name]) for name in both) < top_error
            if token != expected_token:
                assert abs(theirs[str(token)] - theirs[str(expected_token)]) < max(TIE, top_error)
                break


def _served(model: Path, backend: str, cache: str, **options: Any) -> dict[str, Any]:
    requested = ON_GPU | {"attention_backend": backend, "kv_cache_dtype": cache} | options
    answered: dict[str, Any] = in_engine_process(described, str(model), requested)
    return answered


@pytest.mark.gpu
@pytest.mark.parametrize("eager", [False, True])
def test_gac_attention_matches_flash_attention(eager: bool) -> None:
    """Compiled and in full CUDA graphs, or neither; in chunks, and with cached prompts."""
    stock, ours = (
        _served(demo.MODEL, backend, "auto", enforce_eager=eager)
        for backend in ("FLASH_ATTN", "GAC")
    )
    assert stock["attention"] == ["FlashAttentionImpl"]
    assert ours["attention"] == ["GacImpl"]
    assert ours["heads first"]
    _agree(ours, stock, TOP_ERROR)


@pytest.mark.gpu
def test_fp8_cache_is_as_accurate_as_with_flash_attention() -> None:
    """What a cache in FP8 changes, it changes with our kernels no more than with vLLM's."""
    exact = _served(demo.MODEL, "FLASH_ATTN", "auto")
    stock, ours = (_served(demo.MODEL, backend, "fp8") for backend in ("FLASH_ATTN", "GAC"))
    assert ours["attention"] == ["GacImpl"]
    _agree(ours, stock, 2 * TOP_ERROR)
    for mine, theirs, right in zip(*(x["answers"] for x in (ours, stock, exact)), strict=True):
        assert _error(mine, right) < 1.25 * _error(theirs, right)


def _error(actual: Answers, expected: Answers) -> float:
    """The mean difference of the first tokens' top logprobs, which depend on the prompt only."""
    errors = [
        abs(ours[token] - theirs[token])
        for (_, [ours, *_]), (_, [theirs, *_]) in zip(actual, expected, strict=True)
        for token in ours.keys() & theirs.keys()
    ]
    return sum(errors) / len(errors)


@pytest.mark.gpu
def test_gac_attention_is_requested_by_one_flag(tmp_path: Path) -> None:
    """The engine is a process of its own, to which vLLM pickles the choice."""
    log, flags = tmp_path / "log", ("--gpu-memory-utilization", "0.2")
    requested = ("--kv-cache-dtype", "fp8", "--attention-backend", "GAC")
    with serve(demo.MODEL, log, *requested, *flags) as server:
        completions = server.completions(PROMPTS[:2], 8)
    assert [len(tokens) for tokens, _ in completions] == [8, 8]
    logged = log.read_text()
    assert "Attention of 8 query heads, rotary keys 4 x 128, values 4 x 128: decode gac" in logged
    assert "Using LBHNC KV cache layout" in logged


@pytest.mark.gpu
def test_speculative_decoding_with_gac_attention_changes_no_output() -> None:
    plain = _served(demo.MODEL, "GAC", "fp8")
    drafted = _served(demo.MODEL, "GAC", "fp8", speculative_config=DRAFTED)
    _agree(drafted, plain, TOP_ERROR)

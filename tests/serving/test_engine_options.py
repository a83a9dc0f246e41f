"""Options that our attention lacks are refused before a GPU is touched."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.config import CacheConfig, ParallelConfig

from vllm_gac.errors import CheckpointError
from vllm_gac.serving import engine_options


@pytest.fixture(autouse=True)
def _cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_options, "current_platform", SimpleNamespace(is_cuda=lambda: True))
    monkeypatch.delenv("VLLM_BATCH_INVARIANT", raising=False)


def _asked(cache_dtype: Any = "auto", drafted: int | None = None, **parallel: int) -> Any:
    speculative = None if drafted is None else SimpleNamespace(num_speculative_tokens=drafted)
    return SimpleNamespace(
        cache_config=CacheConfig(cache_dtype=cache_dtype),
        parallel_config=SimpleNamespace(**vars(ParallelConfig()) | parallel),
        speculative_config=speculative,
    )


def _on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = SimpleNamespace(is_cuda=lambda: False)
    monkeypatch.setattr(engine_options, "current_platform", cpu)


@pytest.mark.parametrize("dtype", engine_options.KV_CACHE_DTYPES)
def test_what_our_attention_takes_passes(dtype: str) -> None:
    engine_options.check_engine_options(_asked(dtype))


def test_other_cache_dtypes_are_refused_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match=r"--kv-cache-dtype: is fp8_e5m2; .* takes auto, "):
        engine_options.check_engine_options(_asked("fp8_e5m2"))
    _on_a_cpu(monkeypatch)  # whose backends say so themselves
    engine_options.check_engine_options(_asked("fp8_e5m2"))


@pytest.mark.parametrize("tokens", [None, 1, 7])
def test_as_many_drafted_tokens_as_one_launch_verifies_pass(tokens: int | None) -> None:
    engine_options.check_engine_options(_asked(drafted=tokens))


def test_more_drafted_tokens_are_refused_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(CheckpointError, match=r"num_speculative_tokens is 8; .* use 7 or fewer"):
        engine_options.check_engine_options(_asked(drafted=8))
    _on_a_cpu(monkeypatch)
    engine_options.check_engine_options(_asked(drafted=8))


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_a_divided_context_is_refused(phase: str) -> None:
    with pytest.raises(CheckpointError, match=rf"--{phase}-context-parallel-size: is 2; "):
        engine_options.check_engine_options(_asked(**{f"{phase}_context_parallel_size": 2}))


def test_batch_invariance_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with pytest.raises(CheckpointError, match=r"VLLM_BATCH_INVARIANT is 1; .* unset it"):
        engine_options.check_engine_options(_asked())


def test_a_gac_model_does_not_draft() -> None:
    engine_options.check_role(SimpleNamespace(model="gac", runner_type="generate"))  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=r"gac is a gac model, which cannot draft"):
        engine_options.check_role(SimpleNamespace(model="gac", runner_type="draft"))  # type: ignore[arg-type]

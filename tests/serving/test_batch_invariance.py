"""Batch-invariant answers are refused where they could not be kept."""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from vllm_gac.errors import CheckpointError
from vllm_gac.serving import batch_invariance


def test_it_is_refused_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, cpu = (SimpleNamespace(is_cuda=lambda found=found: found) for found in (True, False))
    monkeypatch.setattr(batch_invariance, "current_platform", gpu)
    batch_invariance.check_batch_invariance()
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with pytest.raises(CheckpointError, match=r"VLLM_BATCH_INVARIANT is 1; .* unset it"):
        batch_invariance.check_batch_invariance()
    monkeypatch.setattr(batch_invariance, "current_platform", cpu)
    batch_invariance.check_batch_invariance()

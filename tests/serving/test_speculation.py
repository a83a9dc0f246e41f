"""More drafted tokens than the decode kernel verifies are refused before a GPU is touched."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm_gac.errors import CheckpointError
from vllm_gac.serving import speculation


def _drafting(tokens: int | None) -> Any:
    asked = None if tokens is None else SimpleNamespace(num_speculative_tokens=tokens)
    return SimpleNamespace(speculative_config=asked)


def _on(monkeypatch: pytest.MonkeyPatch, *, cuda: bool) -> None:
    monkeypatch.setattr(speculation, "current_platform", SimpleNamespace(is_cuda=lambda: cuda))


@pytest.mark.parametrize("tokens", [None, 1, 7])
def test_what_one_launch_verifies_is_taken(
    tokens: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    _on(monkeypatch, cuda=True)
    speculation.check_speculation(_drafting(tokens))


def test_more_is_refused_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    _on(monkeypatch, cuda=True)
    with pytest.raises(CheckpointError, match=r"num_speculative_tokens is 8; .* use 7 or fewer"):
        speculation.check_speculation(_drafting(8))
    _on(monkeypatch, cuda=False)
    speculation.check_speculation(_drafting(8))

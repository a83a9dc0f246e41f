"""The page of the shared prefix with invented rows, and the error for a missing answer."""

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.common.engine_batches import answer
from benchmarks.engines.shared_prefix.report import page


def test_the_page_says_what_was_run_and_what_was_held() -> None:
    about = {"machine": "GPU", "torch": "2", "date": "today", "commit": "abc", "command": "do it"}
    row = {"model": "latent-64", "requests": 64, "answered": 64, "held MiB": 700}
    lines = page(about | {"seconds": 9, "rows": [row]}).splitlines()
    assert "GPU, today, torch 2, commit abc, `do it`, 9 s in all." in lines
    assert "| latent-64 | 64 | 64 | 700 |" in lines


@pytest.mark.parametrize("answers", [[[1, 2]], [[1, 2], [3]]], ids=["none", "short"])
def test_a_request_without_an_answer_is_an_error(answers: list[list[int]]) -> None:
    pytest.importorskip("vllm")
    outputs = [SimpleNamespace(outputs=[SimpleNamespace(token_ids=ids)]) for ids in answers]
    llm: Any = SimpleNamespace(generate=lambda *_, **__: outputs)
    with pytest.raises(RuntimeError, match="2 prompts: answers of another length than 2"):
        answer(llm, [[5], [6]], 2)

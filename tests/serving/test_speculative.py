"""Speculative decoding by n-grams verifies several tokens a step and changes no answer."""

from pathlib import Path
from typing import Any

import pytest

from tests.serving.engines import OPTIONS, answers, assert_same, each_in_engine_process
from tests.serving.models import HETEROGENEOUS, write_model

# Greedy answers of a random model soon repeat themselves, as these prompts do, so drafts occur.
PROMPTS = [[(7 * i + j % 9) % 4000 + 5 for j in range(61 + 8 * i)] for i in range(4)]
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 3,
}


@pytest.mark.slow
def test_ngram_drafts_change_no_token_in_any_layer_shape(tmp_path: Path) -> None:
    write_model(tmp_path / "model", HETEROGENEOUS)
    model = str(tmp_path / "model")
    plain, speculative = each_in_engine_process(_serve, [(model, None), (model, NGRAM)])
    assert_same(speculative["answers"], plain["answers"])
    assert plain["drafted"] == 0
    assert speculative["drafted"] > speculative["accepted"] > 0


def _serve(model: str, speculative: dict[str, Any] | None) -> dict[str, Any]:
    from vllm import LLM

    options = OPTIONS | {"disable_log_stats": False}
    llm = LLM(model, speculative_config=speculative, **options)
    answered = answers(llm, PROMPTS, 40)
    counts = {
        metric.name: metric.value
        for metric in llm.get_metrics()
        if "spec_decode" in metric.name and hasattr(metric, "value")
    }
    return {
        "answers": answered,
        "drafted": counts.get("vllm:spec_decode_num_draft_tokens", 0),
        "accepted": counts.get("vllm:spec_decode_num_accepted_tokens", 0),
    }

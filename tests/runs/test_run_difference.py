"""The message for a resumed run that differs from the one that was started."""

from dataclasses import replace
from typing import Any

import pytest

from vllm_gac.planning.request import PlanRequest
from vllm_gac.runs.run_difference import difference

ASKED = PlanRequest(param_ratio=0.8, kv_ratio=0.75)
RUN: dict[str, Any] = {
    "tool_version": "1",
    "threads": 2,
    "device": "cpu",
    "model": {"config_sha256": "a", "files": {"model.safetensors": [1, 2]}},
    "plan": ASKED.record(),
    "whitening": "svd-llm",
    "stats": None,
    "calibration": ["b"],
    "max_tokens": None,
    "offload": False,
}
PLAN = {"version": 1, "layers": [{"intermediate_size": 1}], "methods": []}


def asked(**changes: Any) -> dict[str, Any]:
    return {"plan": replace(ASKED, **changes).record()}


CASES: dict[str, tuple[dict[str, Any], str]] = {
    "ratio": (asked(param_ratio=0.7), "with --param-ratio 0.8, not 0.7"),
    "method": (asked(methods=("heads",)), "with --method heads,prune, not heads"),
    "align": (asked(align="optimal"), "with --align minimal, not optimal"),
    "tp": (asked(tensor_parallel_size=4), "with --tp 1, not 4"),
    "gpu": (asked(gpu="h200"), "with --gpu left out, not h200"),
    "cache": (
        asked(kv_cache_dtype="fp8"),
        "with --kv-cache-dtype auto, not fp8",
    ),
    "group": (asked(key_group=2), "with --key-group left out, not 2"),
    "device": ({"device": "cuda"}, "with --device cpu, not cuda"),
    "whitening": ({"whitening": "svd"}, "with --whitening svd-llm, not svd"),
    "tokens": ({"max_tokens": 9}, "with --max-tokens left out, not 9"),
    "text": ({"calibration": ["c"]}, "with another --calibration"),
    "statistics": ({"stats": {"file": [1, 2]}}, "with another --stats"),
    "release": ({"tool_version": "2"}, "with vllm-gac 1, not 2"),
    "a switch": ({"offload": True}, "without --offload, not with it"),
    "threads": ({"threads": 3}, "with the number of threads 2, not 3"),
    "model": ({"model": {"files": {}}}, "with other contents of the model's files"),
    "a plan": ({"plan": PLAN}, "without --plan, not with one"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_option_is_named_with_both_values(case: str) -> None:
    changes, said = CASES[case]
    assert difference(RUN, RUN | changes) == said


def test_plans_are_not_printed() -> None:
    before = RUN | {"plan": PLAN}
    assert difference(before, before) is None
    assert difference(before, RUN) == "with --plan, not without one"
    assert difference(before, RUN | {"plan": PLAN | {"layers": []}}) == "with another --plan"


@pytest.mark.parametrize("before", [{"plan": {"a": None}}, {"options": {"a": {"b": None}}}])
def test_null_and_nothing_differ_in_a_sentence(before: dict[str, Any]) -> None:
    now: dict[str, Any] = {"plan": {}} if "plan" in before else {"options": {"a": {}}}
    assert (difference(before, now) or "").startswith("with another --")

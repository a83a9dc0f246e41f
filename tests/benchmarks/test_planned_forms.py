"""The search for the fastest plan within a loss, and its page."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.common.llama3_8b import DENSE, without_weights
from benchmarks.planning.forms import FORMS, LOSSES, fastest, page
from vllm_gac.checkpoint.open import Checkpoint

ASKED: dict[str, Any] = {"methods": ("prune",), "gpu": "h200"}


@pytest.fixture
def model(tmp_path: Path) -> Checkpoint:
    small = DENSE | {"num_hidden_layers": 2, "vocab_size": 512}
    (tmp_path / "config.json").write_text(json.dumps(small))
    return without_weights(tmp_path, small)


def test_a_plan_that_may_lose_more_is_faster(model: Checkpoint) -> None:
    little, much = (fastest(model, ASKED, loss, steps=4) for loss in (0.05, 0.5))
    assert little is not None
    assert much is not None
    assert little.expected_loss is not None
    assert much.expected_loss is not None
    assert little.expected_loss <= 0.05 < much.expected_loss <= 0.5
    assert little.nanoseconds is not None
    assert much.nanoseconds is not None
    assert much.nanoseconds.used < little.nanoseconds.used < little.nanoseconds.dense


def test_without_any_loss_nothing_is_faster(model: Checkpoint) -> None:
    assert fastest(model, ASKED, 0.0, steps=2) is None


def test_the_page_marks_the_fastest_form_and_says_what_was_not_searched() -> None:
    form, other, slow = list(FORMS)[:3]

    def row(form: str, of_dense: float) -> dict[str, Any]:
        where = {"profile": "p", "mix": "mean step", "loss": LOSSES[0], "form": form}
        found = {"of_dense": of_dense, "parameters": 0.5, "kv": 0.25, "expected_loss": 0.01}
        return where | found | {"layers": "x", "date": "d", "commit": "c"}

    nothing = {"profile": "p", "mix": "mean step", "loss": LOSSES[0], "form": slow, "commit": "b"}
    text = page([row(form, 0.8), nothing, row(other, 0.7)])
    assert " d, commit c, b." in text
    assert f"| {form} | 80.0% (parameters 50%, KV 25%) | not searched | not searched |" in text
    assert f"| {other} | **70.0% (parameters 50%, KV 25%)** |" in text
    assert f"| {slow} | - | not searched |" in text

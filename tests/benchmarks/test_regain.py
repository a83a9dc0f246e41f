"""The page of what healing wins back, and its budgets."""

import math
from typing import Any

import pytest

from benchmarks.quality.regain import FORMS
from benchmarks.quality.regain_page import COMPRESSED, DENSE, HEALED, page, regained
from tests.support.dense_models import config
from vllm_gac.layout.dims import layout_of

ABOUT = {
    "size": "30m",
    "weights_sha256": "0",
    "parameters": 30_000_000,
    "trained_tokens": 70_000_000,
    "command": "python",
    "commit": "0",
    "date": "today",
    "machine": "GPU",
    "torch": "2",
}
DOCUMENT = [0, 0, 1, 1, 2, 3]


def row(way: str, tokens: int, *losses: float, **more: Any) -> dict[str, Any]:
    form, budget = ("none", "none") if way == DENSE else ("MLP widths", "MLP 0.3")
    place = {"form": form, "budget": budget}
    found = {"losses": list(losses)} if losses else {}
    return ABOUT | {"way": way, "tokens": tokens, **place, **found, **more}


ROWS = [
    row(DENSE, 0, *[2.0] * 6, document=DOCUMENT),
    row(COMPRESSED, 0, *[2.2] * 6),
    row(HEALED, 1000, *[2.1] * 6),
    row(HEALED, 4000, *[2.05] * 6),
    row("local", 1000),
]


def test_the_page_tells_shares_of_the_loss() -> None:
    text = page(ROWS)
    curve = "| MLP widths | MLP 0.3 | +22.14 % (+22.14 to +22.14) | 50 (50 to 50) | 75 (75 to 75) |"
    assert curve in text
    assert "| MLP widths | MLP 0.3 | local | 0: nothing became better |" in text


def test_the_page_tells_what_else_healed() -> None:
    by = "torchrun --nproc-per-node 4 -m vllm_gac heal"
    text = page([*ROWS, row(HEALED, 8000, *[2.01] * 6, healed_by=by)])
    assert f"MLP widths, 8,000 tokens: healed by `{by}`." in text


def test_a_page_of_a_run_that_was_stopped_lacks_what_was_not_measured() -> None:
    assert "| MLP widths | MLP 0.3 | +22.14 % (+22.14 to +22.14) |\n" in page(ROWS[:2])
    assert "##" not in page(ROWS[1:])


def test_nothing_is_a_share_of_a_loss_that_may_be_noise() -> None:
    noise = row(COMPRESSED, 0, 2.2, 2.2, 1.8, 1.8, 2.1, 1.9)
    assert "| little was lost |" in page([ROWS[0], noise, ROWS[2]])


def test_the_interval_is_over_documents() -> None:
    healed = [2.2, 2.2, 2.0, 2.0, 2.1, 2.1]
    middle, low, high = regained(healed, ROWS[1]["losses"], ROWS[0])
    assert middle == pytest.approx(0.5)
    assert low == pytest.approx(0.0, abs=0.2)
    assert high == pytest.approx(1.0, abs=0.2)
    alike = regained(healed, ROWS[1]["losses"], ROWS[0] | {"document": range(6)})
    assert low < alike[1] < middle < alike[2] <= high


def test_budgets_are_of_what_the_methods_change() -> None:
    dense = layout_of(config())
    for form, (mild, hard) in FORMS.items():
        requests = [budget.request(dense) for budget in (mild, hard)]
        assert (requests[1].param_ratio, requests[1].kv_ratio) < (
            requests[0].param_ratio,
            requests[0].kv_ratio,
        ), form
    mlp = sum(math.prod(shape) for name, shape in dense.tensors().items() if ".mlp." in name)
    kept = FORMS["MLP widths"][1].request(dense).param_ratio * dense.parameters
    assert kept == pytest.approx(dense.parameters - 0.7 * mlp)

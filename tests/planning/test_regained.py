"""What healing wins back is what trials found; it chooses no dims, and says what loss is left."""

import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.measured_layers import made_up_losses
from vllm_gac.checkpoint.open import Checkpoint
from vllm_gac.errors import PlanError
from vllm_gac.planning.like import OtherPlan
from vllm_gac.planning.loss_range import expected_for
from vllm_gac.planning.plan_file import Plan
from vllm_gac.planning.planner import best_plan, prior_plan
from vllm_gac.planning.problem import Problems
from vllm_gac.planning.regained import (
    ERROR,
    MILLIONS,
    SHARES,
    TOKENS,
    left_after,
    outside_trials,
)
from vllm_gac.planning.request import PlanRequest

# Without low rank there are fewer candidates, and the search is short.
METHODS = ("heads", "prune")


def test_more_tokens_win_back_more_and_beyond_the_trials_no_more() -> None:
    left = [left_after(tokens) for tokens in (None, 1, 1000, TOKENS[0], 200_000, TOKENS[-1])]
    assert left[0] == 1
    assert left[1] > 1 - 1e-4
    assert all(before > after for before, after in pairwise(left))
    assert left_after(10**10) == left[-1] == 1 - SHARES[-1]


@pytest.mark.parametrize(
    ("tokens", "millions", "said"),
    [
        (TOKENS[0], MILLIONS[0], None),
        (TOKENS[0] - 1, MILLIONS[0], f"these were on {TOKENS[0]:,} to {TOKENS[-1]:,} tokens"),
        (10**8, MILLIONS[0], "tokens (more are expected to win no more)"),
        (TOKENS[0], 8000, f"of models of {MILLIONS[0]}"),
    ],
)
def test_what_no_trial_was_like_is_said(tokens: int, millions: int, said: str | None) -> None:
    found = outside_trials(tokens, millions * 10**6)
    assert found is None if said is None else said in (found or "")


@pytest.fixture(scope="module")
def problems(demo: Checkpoint) -> Problems:
    return Problems(demo)


def planned(demo: Checkpoint, problems: Problems, tokens: int | None, **asked: Any) -> Plan:
    request = PlanRequest(methods=METHODS, heal_tokens=tokens, **asked)
    return best_plan(demo, made_up_losses(demo.layout), request, problems=problems)


@settings(max_examples=10)
@given(
    tokens=st.integers(1, 10**8),
    param_ratio=st.floats(0.75, 1),
    kv_ratio=st.floats(0.4, 1),
    latency_ratio=st.none() | st.floats(0.8, 1),
)
@example(tokens=TOKENS[-1], param_ratio=0.8, kv_ratio=0.5, latency_ratio=None)
def test_healing_chooses_no_dims_within_any_limit_and_leaves_less(
    demo: Checkpoint, problems: Problems, tokens: int, **asked: Any
) -> None:
    without, healed = (planned(demo, problems, count, **asked) for count in (None, tokens))
    told = healed.notes["healing"]
    assert healed.model_copy(update={"notes": without.notes}) == without
    assert {**without.notes, "healing": told} == healed.notes
    lost = without.expected_loss
    assert lost is not None
    left, error = left_after(tokens) * lost, ERROR * lost
    assert told == {
        "tokens": tokens,
        "expected_loss": pytest.approx(left, abs=2e-6),
        "error": pytest.approx(error, abs=2e-6),
    }
    assert told["expected_loss"] <= lost


def test_an_asked_loss_is_the_one_after_healing(demo: Checkpoint, problems: Problems) -> None:
    """So a plan may lose as much before it as healing leaves the asked loss of, and is faster."""
    most = 0.05
    without, healed = (planned(demo, problems, n, max_loss=most) for n in (None, TOKENS[-1]))
    allowed, left = expected_for(most), healed.notes["healing"]["expected_loss"]
    assert without.expected_loss is not None
    assert healed.expected_loss is not None
    assert 0.8 * allowed < left <= allowed < healed.expected_loss
    assert without.expected_loss <= allowed
    assert healed.nanoseconds.used < without.nanoseconds.used
    before = math.expm1(math.log1p(most) / left_after(TOKENS[-1]))
    assert planned(demo, problems, None, max_loss=before).layers == healed.layers


def test_a_loss_that_is_too_small_is_refused_by_what_healing_leaves(
    demo: Checkpoint, problems: Problems
) -> None:
    def least(tokens: int | None) -> float:
        with pytest.raises(PlanError, match=r"--max-loss 0.01%: .* allow more") as refused:
            planned(demo, problems, tokens, max_loss=1e-4, kv_ratio=0.4)
        return float(str(refused.value).partition("lose ")[2].partition("%")[0]) / 100

    left = left_after(TOKENS[-1])
    expected = math.expm1(left * math.log1p(least(None)))
    assert least(TOKENS[-1]) == pytest.approx(expected, abs=2e-4)


def test_plans_by_the_losses_of_other_models_tell_both_losses(demo: Checkpoint) -> None:
    plan = prior_plan(demo, PlanRequest(param_ratio=0.8, heal_tokens=TOKENS[-1]))
    assert plan.expected_loss is None
    assert plan.notes["healing"]["expected_loss"] < plan.notes["expected_loss"]


def test_another_tools_dims_say_nothing_of_what_is_lost(demo: Checkpoint) -> None:
    other = OtherPlan("ranks", demo.layout, demo.layout)
    with pytest.raises(PlanError, match=r"--heal-tokens: another model's dims .* give --stats"):
        prior_plan(demo, PlanRequest(heal_tokens=1000), other)

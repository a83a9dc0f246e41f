"""Plans for models that are healed: what each form wins back decides, and is what trials found."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from benchmarks.common.json_lines import lines_of
from benchmarks.quality.regain_fit import FORMS, fit
from benchmarks.quality.regain_page import page
from tests.planning.test_plan_file import DEMO, model
from tests.support.measured_layers import made_up_losses
from vllm_gac.errors import PlanError
from vllm_gac.planning.like import OtherPlan, request_like
from vllm_gac.planning.loss_range import expected_for
from vllm_gac.planning.losses import Losses, after_healing, loss_of
from vllm_gac.planning.plan_file import Plan, planned_layout
from vllm_gac.planning.planner import best_plan, prior_plan
from vllm_gac.planning.regained import (
    ERROR,
    MILLIONS,
    SHARES,
    TOKENS,
    outside_trials,
    regained,
)
from vllm_gac.planning.request import PlanRequest

QUALITY = Path(__file__).parents[2] / "benchmarks" / "results" / "quality"
# Without low rank there are fewer candidates, and the search is short.
METHODS = ("heads", "prune")


def test_the_table_is_that_of_the_committed_trials() -> None:
    rows = lines_of(QUALITY / "regain_h200.jsonl")
    found = fit(rows)
    assert tuple(found.tokens) == TOKENS
    assert {form: tuple(np.round(found.shares[form], 2)) for form in FORMS} == SHARES
    assert round(found.error, 2) == ERROR
    sizes = {round(row["parameters"] / 1e6) for row in rows}
    assert (min(sizes), max(sizes)) == MILLIONS
    assert (QUALITY / "regain_h200.md").read_text(encoding="utf-8") == page(rows)


def test_more_tokens_win_back_more_and_beyond_the_trials_no_more() -> None:
    counts = (1, 1000, TOKENS[0], 200_000, TOKENS[-1])
    for form in SHARES:
        shares = [regained(form, tokens) for tokens in counts]
        assert 0 < shares[0] < 1e-4
        assert all(before < after for before, after in pairwise(shares))
        assert regained(form, 10**10) == shares[-1] == SHARES[form][-1]


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


def test_every_curve_is_scaled_by_its_form(tmp_path: Path) -> None:
    losses = made_up_losses(model(tmp_path / "demo", **DEMO).layout)
    left = after_healing(losses, TOKENS[-1])
    for name, form in (
        ("rotary2", "rotary heads"),
        ("latent1", "latent keys"),
        ("value1", "latent keys"),
        ("width", "MLP widths"),
        ("rank.mlp.up_proj", "low rank"),
        ("rank.self_attn.q_proj", "low rank"),
    ):
        share = left[0][name][:-1] / losses[0][name][:-1]
        np.testing.assert_allclose(share, 1 - SHARES[form][-1], err_msg=name)


def plans(directory: Path, **asked: float) -> tuple[Plan, Plan, Losses]:
    """A plan that knows nothing of healing, one for it, and the losses of both."""
    demo = model(directory / "demo", **DEMO)
    losses = made_up_losses(demo.layout)
    without, healed = (
        best_plan(demo, losses, PlanRequest(methods=METHODS, heal_tokens=tokens, **asked))
        for tokens in (None, TOKENS[-1])
    )
    for plan in (without, healed):
        layers = planned_layout(demo, plan).layers
        assert loss_of(demo.layout, losses, layers) == pytest.approx(plan.expected_loss, abs=2e-6)
    return without, healed, losses


def test_a_plan_for_healing_is_the_better_one_after_it_and_the_worse_one_before(
    tmp_path: Path,
) -> None:
    without, healed, losses = plans(tmp_path, param_ratio=0.8, kv_ratio=0.5)
    demo = model(tmp_path / "demo", **DEMO)
    left = after_healing(losses, TOKENS[-1])
    after = [loss_of(demo.layout, left, planned_layout(demo, x).layers) for x in (without, healed)]
    assert without.layers != healed.layers
    assert after[1] < after[0]
    assert without.expected_loss < healed.expected_loss
    told = healed.notes["healing"]
    assert told["expected_loss"] == pytest.approx(after[1], abs=2e-6)
    assert told["error"] == pytest.approx(ERROR * healed.expected_loss, abs=2e-6)
    assert "healing" not in without.notes


def test_an_asked_loss_is_the_one_after_healing_once(tmp_path: Path) -> None:
    """A plan for healing may lose more before it, and is faster; what is left is within."""
    without, healed, _ = plans(tmp_path, max_loss=0.05)
    allowed = expected_for(0.05)
    left = healed.notes["healing"]["expected_loss"]
    assert 0.8 * allowed < left <= allowed < healed.expected_loss
    assert without.expected_loss <= allowed
    assert healed.nanoseconds.used < without.nanoseconds.used


def test_plans_by_the_losses_of_other_models_tell_both_losses(tmp_path: Path) -> None:
    demo = model(tmp_path / "demo", **DEMO)
    plan = prior_plan(demo, PlanRequest(param_ratio=0.8, heal_tokens=TOKENS[-1]))
    assert plan.expected_loss is None
    assert plan.notes["healing"]["expected_loss"] < plan.notes["expected_loss"]


def test_another_tools_dims_are_worth_the_same_healed_or_not(tmp_path: Path) -> None:
    dense = model(tmp_path / "demo", **DEMO).layout
    with pytest.raises(PlanError, match="leave out --heal-tokens"):
        request_like(PlanRequest(heal_tokens=1000), OtherPlan("ranks", dense, dense))

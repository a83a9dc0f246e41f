"""Plans without statistics meet budgets, use allowed dims, and make layers nearly equal."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from tests.planning.test_plan_file import Models
from tests.support.measured_layers import made_up_losses
from vllm_gac.compression.methods.registry import METHODS
from vllm_gac.errors import PlanError
from vllm_gac.gpu.profile_files import read_profile, write_profile
from vllm_gac.layout.dims import LINEARS, breakeven_rank
from vllm_gac.planning.losses import prior_losses
from vllm_gac.planning.planner import best_plan, prior_plan
from vllm_gac.planning.request import PlanRequest


@pytest.mark.parametrize("name", ["8B", "demo"])
@pytest.mark.parametrize(
    "ratios", [(0.9, 0.75), (0.85, 0.75), (0.8, 0.5), (0.7, 0.5), (0.6, 0.375)]
)
def test_budgets_are_nearly_used_up(models: Models, name: str, ratios: tuple[float, float]) -> None:
    plan = prior_plan(models[name], PlanRequest(param_ratio=ratios[0], kv_ratio=ratios[1]))
    dense = models[name].layout
    step = 3 * dense.hidden_size * 64  # one step of one layer's MLP
    whole = all(s.intermediate_size == dense.layers[0].intermediate_size for s in plan.layers)
    assert whole or plan.parameters.allowed - plan.parameters.used < step


@pytest.mark.parametrize("form", ["rotary", "latent"])
@pytest.mark.parametrize("groups", [(1, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize(
    "asked",
    [
        {"param_ratio": 0.9, "kv_ratio": 0.5},
        # Whole heads and low ranks alone would lose less.
        {"param_ratio": 0.8, "methods": ("heads", "lowrank")},
    ],
)
def test_forms_and_groups_are_obeyed(
    models: Models, asked: dict[str, Any], groups: tuple[int, int], form: str
) -> None:
    key_group, value_group = groups
    grouped = {"key_group": key_group, "value_group": value_group, "key_form": form}
    for section in prior_plan(models["big"], PlanRequest(**asked, **grouped)).layers:
        assert section.key.form == form
        assert section.key.heads == 8 // key_group
        assert section.value.heads == 8 // value_group


def test_what_some_methods_can_do_is_done_with_more_of_them(models: Models) -> None:
    few, many = (
        prior_plan(models["big"], PlanRequest(methods=methods, param_ratio=0.8, max_loss=0.43))
        for methods in (("lowrank",), ("heads", "lowrank"))
    )
    assert many.nanoseconds is not None
    assert many.nanoseconds == few.nanoseconds


def test_the_note_of_the_gap_names_its_unit_if_it_is_not_of_loss(models: Models) -> None:
    """A plan that is the fastest of those that lose about as little has a gap of loss."""
    big, request = models["big"], PlanRequest(methods=("heads",), kv_ratio=0.5)
    losses = made_up_losses(big.layout)
    plain, faster = (best_plan(big, losses, replace(request, gpu=gpu)) for gpu in (None, "h200"))
    more = (faster.expected_loss or 0) - (plain.expected_loss or 0)
    assert faster.notes["gap"] == pytest.approx(more + plain.notes["gap"], abs=2e-6)
    assert more > 1e-5
    for minimize, name in (("time", "gap_nanoseconds"), ("bytes", "gap_bytes")):
        request = PlanRequest(methods=("heads",), max_loss=0.05, minimize=cast("Any", minimize))
        notes = prior_plan(models["big"], request).notes
        assert [key for key in notes if key.startswith("gap")] == [name]


def test_dims_are_those_of_the_profile_as_it_is_now(tmp_path: Path) -> None:
    path, offered = tmp_path / "profile.json", []
    for noise in (0.02, 0.25):
        write_profile(path, read_profile("h200").model_copy(update={"noise": noise}))
        offered.append(PlanRequest(align="measured", gpu=str(path)).up_to(1024, "width"))
    assert offered[0] != offered[1]


def test_the_cache_cannot_shrink_without_the_heads_method(models: Models) -> None:
    with pytest.raises(PlanError, match=r"--kv-ratio 0.75.* --method prune"):
        prior_plan(models["demo"], PlanRequest(param_ratio=0.9, kv_ratio=0.75, methods=["prune"]))


def test_forms_that_three_kv_heads_cannot_have_are_explained(models: Models) -> None:
    with pytest.raises(PlanError, match="3 KV heads"):
        prior_plan(models["odd"], PlanRequest(param_ratio=0.9, kv_ratio=0.5, key_group=2))
    with pytest.raises(PlanError, match="whole key heads"):
        prior_plan(
            models["8B"], PlanRequest(param_ratio=0.9, kv_ratio=0.5, key_group=2, value_group=1)
        )


def test_losses_are_convex_and_nothing_is_lost_without_compression(models: Models) -> None:
    """Losses are strictly convex, so equal layers get nearly equal dims."""
    dense = models["demo"].layout
    curves, own = prior_losses(dense, METHODS)[0], dense.layers[0]
    assert {name for name in curves if not name.startswith("rank.")} == {
        *("rotary1", "rotary2", "latent1", "latent2", "value1", "value2", "width"),
    }
    for name, curve in curves.items():
        if name.startswith("rank."):
            continue
        slopes = np.diff(curve)
        assert curve[-1] == 0, name
        assert (slopes < 0).all(), name
        assert (np.diff(slopes[len(slopes) // 8 :]) > 0).all(), name
    assert len(curves["width"]) == own.intermediate_size + 1
    for linear in LINEARS:
        curve = curves[f"rank.{linear}"]
        whole = math.ceil(breakeven_rank(dense, own, linear))
        assert len(curve) == min(dense.linear_shape(own, linear)) + 1
        assert (curve[whole:] == 0).all()
        assert (np.diff(curve[:whole]) < 0).all()

"""The shipped plan of the demo model equals the plan that `compress` makes."""

from pathlib import Path

import pytest

from tests.conftest import MAKE_SERVE
from vllm_gac.checkpoint.open import open_checkpoint
from vllm_gac.compression.statistics_file import open_statistics
from vllm_gac.demo import MODEL, PLAN
from vllm_gac.planning.losses import loss_of, read_losses
from vllm_gac.planning.plan_file import planned_layout, read_plan
from vllm_gac.planning.planner import best_plan
from vllm_gac.planning.request import PlanRequest

ASKED = PlanRequest(param_ratio=0.85, kv_ratio=0.75)
ROOT = Path(__file__).parents[2]


def test_the_shipped_plan_fits_the_model_and_the_budgets() -> None:
    dense = open_checkpoint(MODEL)
    plan = read_plan(PLAN, dense)
    assert (plan.param_ratio, plan.kv_ratio) == (ASKED.param_ratio, ASKED.kv_ratio)
    assert plan.methods == list(ASKED.methods)
    assert plan.align == ASKED.align
    assert plan.notes["planner"] == "knapsack"
    assert plan.notes["calibration"]["tokens"] == str(1 << 16)


def test_make_serve_and_the_tests_compress_alike() -> None:
    options = " ".join(MAKE_SERVE).replace(str(PLAN), str(PLAN.relative_to(ROOT)))
    assert f"HOW = {options}\n" in (ROOT / "Makefile").read_text()


@pytest.mark.slow
def test_calibrating_as_compress_does_leads_to_it(demo_statistics: Path) -> None:
    """Not to the same digits: sums depend on the number of threads and on the processor."""
    dense = open_checkpoint(MODEL)
    shipped = read_plan(PLAN, dense)
    statistics = open_statistics(demo_statistics, dense)
    losses = read_losses(statistics)
    assert (
        statistics.measured.metadata["tokens_sha256"]
        == shipped.notes["calibration"]["tokens_sha256"]
    )
    best = best_plan(dense, losses, ASKED)
    assert best.expected_loss == pytest.approx(shipped.expected_loss, rel=0.01)
    layers = planned_layout(dense, shipped).layers
    assert loss_of(dense.layout, layers, losses) <= 1.01 * (best.expected_loss or 0)

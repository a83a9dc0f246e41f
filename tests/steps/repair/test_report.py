"""The costs and gains of a repair: the tables of the GAC paper, and unmeasured dims."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.alignment.test_padded_layout import dense
from tests.alignment.test_rules import attention, profile
from vllm_gac.alignment.rules import padded_layout
from vllm_gac.layout.dims import KeyLayout, ValueLayout
from vllm_gac.steps.repair.report import repair_report

# Llama-3-8B's 512 KV heads by the size that PaLU leaves at a ratio of 0.8, of the authors'
# repository (https://github.com/JihaoXin/GAC, scripts/run_c4_dimension_repair.py).
# Table 8: ms of attention on an A100 by head dim. The paper pads 107 to 112 and 125 to 128.
TABLE_8 = {
    107: 2.064, 112: 1.490, 114: 2.049, 117: 2.054, 120: 1.557, 121: 1.964, 125: 1.975, 128: 1.439,
}  # fmt: skip


@pytest.fixture
def a100(tmp_path: Path) -> str:
    dims = sorted(TABLE_8)
    sweep = attention(dims, [1000 * TABLE_8[dim] for dim in dims])
    return profile(tmp_path, gpu="A100", attention=[sweep])


@pytest.mark.parametrize(
    ("dim", "overhead", "gain"), [(107, 4.67, 27.8), (121, 5.79, 26.7), (125, 2.40, 27.1)]
)
def test_the_papers_gain_by_dim(a100: str, dim: int, overhead: float, gain: float) -> None:
    """Table 8."""
    model = dense(128)
    layer = replace(model.layers[0], key=KeyLayout("latent", 2, dim), value=ValueLayout(2, 128))
    model = replace(model, layers=(layer,))
    [change] = repair_report(model, padded_layout(model, "minimal"), a100).changes
    assert change.overhead_percent == pytest.approx(overhead, abs=0.01)
    assert change.gain_percent == pytest.approx(gain, abs=0.05)


def test_a_dim_that_was_not_measured_has_no_gain(a100: str) -> None:
    model = dense(128)
    layer = replace(model.layers[0], key=KeyLayout("latent", 2, 99), intermediate_size=61)
    model = replace(model, layers=(layer,))
    report = repair_report(model, padded_layout(model, "minimal"), a100)
    assert [(c.role, c.before, c.after) for c in report.changes] == [
        ("head", 99, 104),
        ("width", 61, 64),
    ]
    assert {c.gain_percent for c in report.changes} == {None}


def test_gains_of_a_width_are_those_of_each_gpus_part() -> None:
    model = dense(128, width=2 * 12185)
    after = padded_layout(model, "minimal", tp=2)
    [change] = repair_report(model, after, "h200", tp=2).changes
    assert change.after == 2 * 12192
    assert change.gain_percent is not None
    assert change.gain_percent > 30
    assert repair_report(model, after, "h200").changes[0].gain_percent is None

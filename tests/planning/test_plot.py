"""The picture of a plan has a bar for each layer, with misaligned dims in red."""

import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tests.planning.test_plan_file import DEMO, model
from tests.support.command import error, usage
from tests.support.measured_layers import made_up_losses
from vllm_gac.planning.planner import best_plan
from vllm_gac.planning.plot import svg_of
from vllm_gac.planning.request import PlanRequest


@pytest.mark.parametrize(("align", "red"), [("minimal", False), ("none", True)])
def test_a_plan_is_drawn_with_misaligned_dims_in_red(align: str, red: bool, tmp_path: Path) -> None:
    demo = model(tmp_path / "demo", **DEMO)
    asked = PlanRequest(param_ratio=0.8, kv_ratio=0.6, align=align)  # type: ignore[arg-type]
    plan = best_plan(demo, made_up_losses(demo.layout), asked)
    picture = svg_of(plan, demo)
    ET.fromstring(picture)
    assert picture == svg_of(plan, demo)
    assert ("#d64545" in picture) == red
    assert len(re.findall("fill: #e4e7eb", picture)) == 2 * 4 + 2  # and two legends
    assert f"{plan.parameters.used / plan.parameters.dense:.1%}" in picture


@pytest.mark.parametrize("name", ["plan.png", "plan"])
def test_other_formats_are_refused_before_anything_is_planned(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "--plot" in usage(capsys, "plan", tmp_path / "none", "--plot", tmp_path / name)


def test_without_matplotlib_the_extra_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "vllm_gac.planning.plot")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    said = error(capsys, "plan", tmp_path, "--plot", tmp_path / "plan.svg", "--param-ratio", 0.9)
    assert "vllm-gac[plots]" in said

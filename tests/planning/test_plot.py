"""The picture of a plan is well-formed and complete, and shows misaligned dims in red."""

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tests.planning.test_plan_file import DEMO, model
from tests.support.command import usage
from tests.support.measured_layers import made_up_losses
from vllm_gac.planning.picture import Picture, Text, svg
from vllm_gac.planning.planner import best_plan
from vllm_gac.planning.plot import draw_plan
from vllm_gac.planning.request import PlanRequest


def test_every_layer_is_drawn_in_its_own_frame(tmp_path: Path) -> None:
    demo = model(tmp_path / "demo", **DEMO)
    for strategy, red in (("minimal", False), ("none", True)):
        asked = PlanRequest(param_ratio=0.8, kv_ratio=0.6, align=strategy)  # type: ignore[arg-type]
        plan = best_plan(demo, made_up_losses(demo.layout), asked)
        picture = svg(draw_plan(plan, demo.layout))
        root = ET.fromstring(picture)
        frames = [
            r for r in root.iter("{http://www.w3.org/2000/svg}rect") if r.get("fill") == "#e4e7eb"
        ]
        assert len(frames) == 2 + 2 * 4  # two budgets, two rows of four layers
        assert ("#d64545" in picture) == red
        assert f"{plan.parameters.used:,}" in picture


def test_text_is_escaped() -> None:
    assert ">&lt;8&amp;8&gt;<" in svg(Picture(9, 9, [Text(5, 3, "<8&8>", 12, "#00ff00", True)]))


@pytest.mark.parametrize("name", ["plan.png", "plan"])
def test_other_formats_are_refused_before_anything_is_planned(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = usage(capsys, "plan", tmp_path / "none", "--plot", tmp_path / name)
    assert said == f"--plot {tmp_path / name}: only SVG is drawn; name it so"

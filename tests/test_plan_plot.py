"""The picture of a plan: well-formed, complete, and red where a dim is misaligned."""

import xml.etree.ElementTree as ET
from pathlib import Path

from tests.measured_layers import made_up_losses
from tests.test_plan import DEMO, model
from vllm_gac.choices import Dims
from vllm_gac.plan_plot import draw_plan
from vllm_gac.planner import Asked, best_plan


def test_every_layer_is_drawn_in_its_own_frame(tmp_path: Path) -> None:
    demo = model(tmp_path / "demo", **DEMO)
    for strategy, red in (("minimal", False), ("none", True)):
        asked = Asked(param_ratio=0.8, kv_ratio=0.6, dims=Dims(strategy))  # type: ignore[arg-type]
        plan = best_plan(demo, made_up_losses(demo.layout), asked)
        picture = draw_plan(plan, demo.layout)
        root = ET.fromstring(picture)
        frames = [
            r for r in root.iter("{http://www.w3.org/2000/svg}rect") if r.get("fill") == "#e4e7eb"
        ]
        assert len(frames) == 2 + 2 * 4  # two budgets, two rows of four layers
        assert ("#d64545" in picture) == red
        assert f"{plan.parameters.used:,}" in picture

"""The picture of a plan is well-formed and complete, and shows misaligned dims in red."""

import io
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from PIL import Image

from tests.planning.test_plan_file import DEMO, model
from tests.support import dense_models
from tests.support.command import usage
from tests.support.measured_layers import made_up_losses
from vllm_gac.cli import main
from vllm_gac.planning.picture import Box, Picture, Text, png, svg
from vllm_gac.planning.planner import best_plan
from vllm_gac.planning.plot import draw_plan
from vllm_gac.planning.request import PlanRequest


def test_every_layer_is_drawn_in_its_own_frame(tmp_path: Path) -> None:
    demo = model(tmp_path / "demo", **DEMO)
    for strategy, red in (("minimal", False), ("none", True)):
        asked = PlanRequest(param_ratio=0.8, kv_ratio=0.6, align=strategy)  # type: ignore[arg-type]
        plan = best_plan(demo, made_up_losses(demo.layout), asked)
        drawn = draw_plan(plan, demo.layout)
        picture = svg(drawn)
        root = ET.fromstring(picture)
        frames = [
            r for r in root.iter("{http://www.w3.org/2000/svg}rect") if r.get("fill") == "#e4e7eb"
        ]
        assert len(frames) == 2 + 2 * 4  # two budgets, two rows of four layers
        assert ("#d64545" in picture) == red
        assert f"{plan.parameters.used:,}" in picture
        frame = next(shape for shape in drawn.shapes if isinstance(shape, Box))
        image = Image.open(io.BytesIO(png(drawn)))
        assert image.size == (2 * drawn.width, 2 * drawn.height)
        middle = image.getpixel((round(2 * frame.x) + 2, round(2 * frame.y + frame.height)))
        assert middle == (76, 159, 112)  # the colour of the used share
        colours = {colour for _, colour in image.getcolors(1 << 20) or []}
        assert ((214, 69, 69) in colours) == red


def test_svg_and_png_show_the_same() -> None:
    shapes = [
        Box(10, 10, 20, 5, "#ff0000"),
        Box(0, 0, 0, 5, "#0000ff"),
        Text(50, 30, "<8&8>", 12, "#00ff00", True),
    ]
    picture = Picture(100, 40, shapes)
    assert "&lt;8&amp;8&gt;" in svg(picture)
    image = Image.open(io.BytesIO(png(picture)))
    assert image.size == (200, 80)
    red = [(x, y) for x in range(200) for y in range(80) if image.getpixel((x, y)) == (255, 0, 0)]
    assert (min(red), max(red), len(red)) == ((20, 20), (59, 29), 400)
    assert (0, 0, 255) not in {colour for _, colour in image.getcolors() or []}
    white = (255, 255, 255)
    written = [x for x in range(200) for y in range(32, 80) if image.getpixel((x, y)) != white]
    assert abs((min(written) + max(written)) / 2 - 100) < 4  # the text has its middle at 50


@pytest.mark.parametrize("suffix", [".svg", ".PNG"])
def test_the_suffix_says_what_is_written(tmp_path: Path, suffix: str) -> None:
    dense = dense_models.write(tmp_path / "dense", dense_models.config())
    plot = tmp_path / f"plan{suffix}"
    assert main(["plan", str(dense), "--kv-ratio", "0.5", "--plot", str(plot)]) == 0
    starts = {".svg": b"<svg", ".PNG": b"\x89PNG"}
    assert plot.read_bytes().startswith(starts[suffix])


@pytest.mark.parametrize("name", ["plan.pdf", "plan"])
def test_other_formats_are_refused_before_anything_is_planned(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = usage(capsys, "plan", tmp_path / "none", "--plot", tmp_path / name)
    assert said == f"--plot {tmp_path / name}: only .svg and .png are drawn; name it so"

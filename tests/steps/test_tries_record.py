"""What the chosen model says of what was tried: config.json, the card and the picture agree."""

import json
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.hub import files_of
from vllm_gac.planning.picture import svg
from vllm_gac.steps.tries import Try
from vllm_gac.steps.tries_picture import draw_tries
from vllm_gac.steps.tries_record import record

TRIES = [
    Try(0.0055, 0.0054, 0.83, 1.013, 1.009, 1.017, 40_000, []),
    Try(0.003, 0.0029, 0.87, 1.006, 1.0035, 1.0085, 40_000, []),
    Try(0.004, 0.0039, 0.853, 1.008, 1.0055, 1.0098, 40_000, []),
]
SVG = "{http://www.w3.org/2000/svg}"
ASKED, CHOSEN, OTHERS, UNHEALED = "#d64545", "#4c9f70", "#2f7ed8", "#8064a2"


def lines(picture: str) -> list[tuple[str, list[tuple[float, float]]]]:
    """The colour and the points of each line."""
    return [
        (
            str(line.get("stroke")),
            [
                (float(x), float(y))
                for x, y in re.findall(r"([\d.]+),([\d.]+)", line.get("points", ""))
            ],
        )
        for line in ET.fromstring(picture).iter(f"{SVG}polyline")
    ]


def test_intervals_are_drawn_where_they_are_beside_the_asked_loss() -> None:
    """Above in the picture is a smaller y."""
    drawn = lines(svg(draw_tries(0.01, TRIES[2], TRIES)))
    (asked,) = [points[0][1] for colour, points in drawn if colour == ASKED]
    low, high = next(points for colour, points in drawn if colour == CHOSEN)
    assert low[1] > high[1] > asked
    low, high = next(points for colour, points in drawn if colour == OTHERS)
    assert low[1] > asked > high[1]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"gac": {"source": {}}}')
    (tmp_path / "README.md").write_text("# A model\n")
    return tmp_path


def test_what_was_tried_is_written_once_however_often_a_run_goes_on(model: Path) -> None:
    record(model, 0.01, TRIES[2], TRIES)
    written = files_of(model)
    record(model, 0.01, TRIES[2], TRIES)
    assert written == files_of(model)
    card = written["README.md"].decode()
    assert "| 0.0039 | 0.80 % | 0.55 to 0.98 % | 85.3% | this model |" in card
    (picture,) = re.findall(r"!\[[^]]*\]\((.*)\)", card)
    assert picture in written
    source = json.loads(written["config.json"])["gac"]["source"]["max_loss"]
    assert source["asked"] == 0.01
    assert source["measured"] == source["tried"][2]


def test_a_healed_model_tells_both_losses(model: Path) -> None:
    tries = [replace(TRIES[0], unhealed=1.021), TRIES[1]]
    record(model, 0.02, tries[0], tries, heal_tokens=4096)
    card = (model / "README.md").read_text()
    assert "each after a healing on 4,096 tokens" in card
    assert "| 0.0054 | 2.10 % | 1.30 % | 0.90 to 1.70 % | 83.0% | this model |" in card
    assert "| 0.0029 |  | 0.60 % |" in card  # healing made it no better
    found = json.loads((model / "config.json").read_text())["gac"]["source"]["max_loss"]
    assert (found["measured"]["unhealed"], found["heal_tokens"]) == (1.021, 4096)
    marks = (model / "loss.svg").read_text().count(UNHEALED)
    assert marks == 2  # one of the model, one of the legend


def test_a_model_of_few_bytes_tells_its_bytes(model: Path) -> None:
    tries = [replace(one, bytes=one.time / 2) for one in TRIES]
    record(model, 0.01, tries[2], tries)
    card = (model / "README.md").read_text()
    assert "| bytes of weights and cache, of dense |" in card
    assert "| 0.0039 | 0.80 % | 0.55 to 0.98 % | 42.6% | this model |" in card
    assert "Loss against bytes of weights and cache" in (model / "loss.svg").read_text()


@pytest.mark.parametrize("lost", [-0.002, 0.0, 0.3])
def test_a_single_try_of_any_loss_is_drawn_within_the_picture(lost: float) -> None:
    one = Try(0.005, 0.005, 1.0, 1 + lost, 1 + lost, 1 + lost, 1000, [])
    picture = draw_tries(0.01, one, [one])
    for _, points in lines(svg(picture)):
        for x, y in points:
            assert 0 <= x <= picture.width
            assert 0 <= y <= picture.height

"""Pictures made of boxes, lines and text, as SVG."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias
from xml.sax.saxutils import escape

from vllm_gac.checkpoint.regular_files import opened
from vllm_gac.errors import PlanError

# By it a file is known as ours, which another picture may replace.
_BEGINS = "<!-- drawn by vllm-gac -->"


@dataclass(frozen=True, slots=True)
class Box:
    """A filled rectangle. `x` and `y` are its upper left corner."""

    x: float
    y: float
    width: float
    height: float
    fill: str


@dataclass(frozen=True, slots=True)
class Text:
    """A line of text. Its baseline begins at `x`, `y`, or has its middle there if `middle`."""

    x: float
    y: float
    text: str
    size: int
    fill: str
    middle: bool


@dataclass(frozen=True, slots=True)
class Line:
    """A line through `points` (x, y), `width` wide, dashed or not."""

    points: Sequence[tuple[float, float]]
    stroke: str
    width: float = 1.5
    dashed: bool = False


Shape: TypeAlias = Box | Text | Line


@dataclass(frozen=True, slots=True)
class Picture:
    """Shapes on a white background. Later shapes cover earlier ones."""

    width: int
    height: int
    shapes: Sequence[Shape]


def svg(picture: Picture) -> str:
    """Write `picture` as an SVG document."""
    return (
        f"{_BEGINS}<svg xmlns='http://www.w3.org/2000/svg' "
        f"viewBox='0 0 {picture.width} {picture.height}' "
        f"font-family='Helvetica,Arial,sans-serif'><rect width='100%' height='100%' fill='white'/>"
        f"{''.join(map(_element, picture.shapes))}</svg>\n"
    )


def _element(shape: Shape) -> str:
    if isinstance(shape, Box):
        return (
            f"<rect x='{shape.x:.1f}' y='{shape.y:.1f}' width='{shape.width:.1f}' "
            f"height='{shape.height:.1f}' fill='{shape.fill}'/>"
        )
    if isinstance(shape, Line):
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in shape.points)
        dashes = " stroke-dasharray='6 4'" if shape.dashed else ""
        return (
            f"<polyline points='{points}' fill='none' stroke='{shape.stroke}' "
            f"stroke-width='{shape.width:g}'{dashes}/>"
        )
    anchor = "middle" if shape.middle else "start"
    return (
        f"<text x='{shape.x:.1f}' y='{shape.y:.1f}' font-size='{shape.size}' fill='{shape.fill}' "
        f"text-anchor='{anchor}'>{escape(shape.text)}</text>"
    )


def is_svg(path: Path) -> bool:
    """Whether `path` is a picture that `svg` wrote."""
    if not path.is_file():
        return False
    with opened(path, PlanError) as file:
        return file.read(len(_BEGINS)) == _BEGINS.encode()

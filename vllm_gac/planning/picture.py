"""Pictures made of boxes and text, as SVG and as PNG."""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias
from xml.sax.saxutils import escape

# Pixels of a PNG per unit of length.
_SCALE = 2


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


Shape: TypeAlias = Box | Text


@dataclass(frozen=True, slots=True)
class Picture:
    """Shapes on a white background. Later shapes cover earlier ones."""

    width: int
    height: int
    shapes: Sequence[Shape]


def svg(picture: Picture) -> str:
    """Write `picture` as an SVG document."""
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {picture.width} {picture.height}' "
        f"font-family='Helvetica,Arial,sans-serif'><rect width='100%' height='100%' fill='white'/>"
        f"{''.join(map(_element, picture.shapes))}</svg>\n"
    )


def _element(shape: Shape) -> str:
    if isinstance(shape, Box):
        return (
            f"<rect x='{shape.x:.1f}' y='{shape.y:.1f}' width='{shape.width:.1f}' "
            f"height='{shape.height:.1f}' fill='{shape.fill}'/>"
        )
    anchor = "middle" if shape.middle else "start"
    return (
        f"<text x='{shape.x:.1f}' y='{shape.y:.1f}' font-size='{shape.size}' fill='{shape.fill}' "
        f"text-anchor='{anchor}'>{escape(shape.text)}</text>"
    )


def png(picture: Picture) -> bytes:
    """Write `picture` as a PNG file. vLLM installs Pillow, which draws it."""
    from PIL import Image, ImageDraw, ImageFont

    image = Image.new("RGB", (_SCALE * picture.width, _SCALE * picture.height), "white")
    draw = ImageDraw.Draw(image)
    for shape in picture.shapes:
        x, y = _SCALE * shape.x, _SCALE * shape.y
        if isinstance(shape, Box):
            right, bottom = x + _SCALE * shape.width, y + _SCALE * shape.height
            if right - x >= 1 and bottom - y >= 1:  # Pillow draws the last pixel, too
                draw.rectangle((x, y, right - 1, bottom - 1), fill=shape.fill)
        else:
            font = ImageFont.load_default(_SCALE * shape.size)
            anchor = "ms" if shape.middle else "ls"
            draw.text((x, y), shape.text, shape.fill, font, anchor)
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()

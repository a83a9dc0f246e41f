"""One style for all plots. They are SVG files with real text, equal for equal numbers."""

import io
from collections.abc import Callable
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Okabe and Ito's colours: colour-blind readers can tell them apart, and they print well.
BLUE, RED, GREEN, PINK, ORANGE, SKY = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9",
)  # fmt: skip
GREY = "#888888"
# Any: the type that matplotlib asks for lists every setting.
_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "seeds",
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.25,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "legend.frameon": False,
}


def axes_grid(
    width: float, height: float, rows: int = 1, columns: int = 1
) -> tuple[Figure, list[Axes]]:
    """A figure of `width` x `height` inches, and its axes row by row."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def drawn(draw: Callable[[Any], tuple[str, Figure]], result: Any) -> tuple[str, str]:
    """The page that `draw(result)` returns, and its figure as SVG."""
    with mpl.rc_context(_STYLE):
        page, figure = draw(result)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    return page, text[text.index("<svg") :]

"""The picture of a result: grouped bars, as SVG with real text, equal for equal numbers."""

import io
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from benchmarks.common.result import Chart, Result

# Okabe and Ito's colours: colour-blind readers can tell them apart, and they print well.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#888888")
# Any: the type that matplotlib asks for lists every setting.
_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "results",
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
}


def svg(result: Result, chart: Chart) -> str:
    """The picture of `chart`; a value that was not measured has no bar."""
    with mpl.rc_context(_STYLE):
        labels = [str(result.cell(row, chart.label)) for row in result.rows]
        figure = Figure(figsize=(max(7.0, 1.7 * len(labels)), 3.4), layout="constrained")
        axes = figure.subplots()
        width = 0.8 / len(chart.bars)
        for number, column in enumerate(chart.bars):
            values = result.values(column)
            places = [place + number * width for place, value in enumerate(values) if value]
            colour = _COLOURS[number % len(_COLOURS)]
            heights = [value for value in values if value]
            drawn = axes.bar(
                places, heights, 0.92 * width, color=colour, label=result.headers[column]
            )
            axes.bar_label(drawn, fmt="{:.2f}", fontsize=6)
        places = [place + 0.4 - width / 2 for place in range(len(labels))]
        axes.set_xticks(places, [label.replace(" ", "\n") for label in labels])
        axes.set_ylabel(chart.axis)
        figure.legend(ncols=3, loc="outside upper left")
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]

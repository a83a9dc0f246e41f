"""The picture of a result: grouped bars, as SVG with real text, equal for equal numbers."""

import io
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from benchmarks.common.result import Chart, Result

# Okabe and Ito's colours: colour-blind readers can tell them apart, and they print well.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#888888")
# Rows, at most, whose bars are vertical.
_MOST_VERTICAL = 7
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
    """The picture of `chart`, with horizontal bars if it has many rows.

    A value that was not measured has no bar, and a row without values is left out.
    """
    with mpl.rc_context(_STYLE):
        columns = [result.values(column) for column in chart.bars]
        shown = [n for n in range(len(result.rows)) if any(column[n] for column in columns)]
        labels = [str(result.cell(result.rows[n], chart.label)) for n in shown]
        horizontal = len(labels) > _MOST_VERTICAL
        size = (7.0, 1.0 + 0.27 * len(labels)) if horizontal else (max(7.0, 1.7 * len(labels)), 3.4)
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots()
        width = 0.8 / len(chart.bars)
        for number, (column, values) in enumerate(zip(chart.bars, columns, strict=True)):
            bars = {
                place + number * width: value
                for place, n in enumerate(shown)
                if (value := values[n])
            }
            drawn = (axes.barh if horizontal else axes.bar)(
                list(bars),
                list(bars.values()),
                0.92 * width,
                color=_COLOURS[number % len(_COLOURS)],
                label=result.headers[column],
            )
            axes.bar_label(drawn, fmt="{:.2f}", fontsize=6)
        places = [place + 0.4 - width / 2 for place in range(len(labels))]
        if horizontal:
            axes.set_yticks(places, labels)
            axes.margins(y=0.02)
            axes.invert_yaxis()
            axes.grid(visible=True, axis="x")
            axes.grid(visible=False, axis="y")
            axes.set_xlabel(chart.axis)
        else:
            axes.set_xticks(places, [label.replace(" ", "\n") for label in labels])
            axes.set_ylabel(chart.axis)
        figure.legend(ncols=3, loc="outside upper left")
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]

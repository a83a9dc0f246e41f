"""The report's plot as inline SVG: all ratios."""

import io
from collections.abc import Sequence
from itertools import cycle
from typing import Any

import matplotlib as mpl
import matplotlib.ticker
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from loadtest.report.comparison import Comparison

# Okabe and Ito's colours. Colour-blind readers can tell them apart, also in print.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
# Typed as Any, because matplotlib's own type lists every setting.
_STYLE: Any = {
    "svg.fonttype": "none",
    "svg.hashsalt": "loadtest",
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
}
_RATIOS = (("ttft", 50.0), ("ttft", 99.0), ("tpot", 50.0), ("tpot", 99.0))


def ratio_whiskers(comparisons: Sequence[Comparison], labels: Sequence[str]) -> str:
    """All ratios to the baseline with their intervals: what is right of 1 is better."""
    places = list(dict.fromkeys((c.traffic, c.rate) for c in comparisons))
    servers = list(dict.fromkeys(c.label for c in comparisons))
    many = len({traffic for traffic, _ in places}) > 1
    names = [f"{traffic}, {rate:g}/s" if many else f"{rate:g}/s" for traffic, rate in places]
    colours = dict(zip(labels, cycle(_COLOURS), strict=False))
    with mpl.rc_context(_STYLE):
        height = 1.1 + 0.28 * len(places) * (0.5 + 0.5 * len(servers))
        figure = Figure(figsize=(10.5, height), layout="constrained")
        count = len(_RATIOS) + 1
        row = [figure.add_subplot(1, count, i + 1) for i in range(count)]
        for axes, (measure, percent) in zip(row, (*_RATIOS, ("goodput", 0.0)), strict=True):
            for c in comparisons:
                e = c.speedup[measure][percent] if percent else c.goodput
                if not 0 < e.value < np.inf:
                    continue
                place = places.index((c.traffic, c.rate)) + 0.2 * servers.index(c.label)
                # An interval without an end goes to the edge of the picture.
                low, high = max(e.low, e.value / 10), min(e.high, e.value * 10)
                whiskers, colour = [[e.value - low], [high - e.value]], colours[c.label]
                axes.errorbar(
                    e.value, place, xerr=whiskers, fmt="o", color=colour, capsize=3, markersize=4
                )
            axes.axvline(1, color="#888", linestyle=":")
            axes.set(title=f"{measure.upper()} p{percent:g}" if percent else "goodput")
            axes.set(xscale="log", ylim=(len(places) - 0.3, -0.7), yticks=range(len(places)))
            axes.set_yticklabels(names if axes is row[0] else [])
            low, high = axes.get_xlim()
            axes.set_xlim(max(low, 1 / 8), min(max(high, 1.05), 8))
            _plain_ticks(axes)
        if len(servers) > 1:
            for label in servers:
                row[0].plot([], [], "o", color=colours[label], label=label)
            figure.legend(frameon=False, loc="outside lower center", ncols=len(servers))
        return _svg(figure)


def _plain_ticks(axes: Axes) -> None:
    axis = axes.xaxis
    if not axes.has_data() or not np.isfinite(axes.dataLim.get_points()).all():
        # Nothing was answered, so nothing is drawn, and a logarithmic axis would have no limits.
        axis.set_ticks([])
        axes.set_xscale("linear")
        return
    formatter = mpl.ticker.FuncFormatter(lambda value, _: f"{value:g}")
    axis.set_major_formatter(formatter)
    low, high = axis.get_view_interval()
    # Labels at powers of ten alone leave less than two decades without numbers.
    subs = (2.0, 5.0) if high > 6 * max(low, 1e-9) else (1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0)
    axis.set_minor_locator(mpl.ticker.LogLocator(subs=subs))
    axis.set_minor_formatter(formatter)


def _svg(figure: Figure) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]

"""The report's plots as inline SVG: ratios, and latency over rate."""

import io
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
import matplotlib.ticker
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from loadtest.report.comparison import Comparison
from loadtest.report.summary import PooledRuns, Summary

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
    with mpl.rc_context(_STYLE):
        height = 1.1 + 0.28 * len(places) * (0.5 + 0.5 * len(servers))
        figure = Figure(figsize=(10.5, height), layout="constrained")
        row = _row(figure, len(_RATIOS) + 1)
        for axes, (measure, percent) in zip(row, (*_RATIOS, ("goodput", 0.0)), strict=True):
            for c in comparisons:
                e = c.speedup[measure][percent] if percent else c.goodput
                if not 0 < e.value < np.inf:
                    continue
                place = places.index((c.traffic, c.rate)) + 0.2 * servers.index(c.label)
                # An interval without an end goes to the edge of the picture.
                low, high = max(e.low, e.value / 10), min(e.high, e.value * 10)
                colour = _COLOURS[list(labels).index(c.label) % len(_COLOURS)]
                whiskers = [[e.value - low], [high - e.value]]
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
        for label in servers if len(servers) > 1 else ():
            colour = _COLOURS[list(labels).index(label) % len(_COLOURS)]
            row[0].plot([], [], "o", color=colour, label=label)
        if len(servers) > 1:
            figure.legend(frameon=False, loc="outside lower center", ncols=len(servers))
        return _svg(figure)


def latency_over_rate(
    groups: Sequence[PooledRuns], summaries: Sequence[Summary], labels: Sequence[str]
) -> str:
    """Median and p99 of TTFT and TPOT, and what kept the SLO, against the offered rate."""
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(10.5, 3.1), layout="constrained")
        for axes, measure in zip(_row(figure, 3), ("ttft", "tpot", "goodput"), strict=True):
            for label in labels:
                mine = [(g, s) for g, s in zip(groups, summaries, strict=True) if g.label == label]
                colour = _colour(mine[0][0], labels)
                rates = [summary.offered for _, summary in mine]
                if measure == "goodput":
                    within_slo = [summary.good_fraction.value * 100 for _, summary in mine]
                    axes.plot(rates, within_slo, "o-", color=colour, label=label)
                    continue
                for percent, style in ((50.0, "o-"), (99.0, "o--")):
                    line = [summary.latency[measure][percent] for _, summary in mine]
                    values = [_drawn(estimate.value) for estimate in line]
                    axes.plot(rates, values, style, color=colour, markersize=4)
                    axes.fill_between(
                        rates,
                        [_drawn(estimate.low) for estimate in line],
                        [_drawn(estimate.high) for estimate in line],
                        color=colour,
                        alpha=0.15,
                        linewidth=0,
                    )
            axes.set(xlabel="offered requests per second")
        ttft, tpot, goodput = figure.axes
        ttft.set(title="TTFT: p50 solid, p99 dashed", ylabel="milliseconds (log)", yscale="log")
        tpot.set(title="TPOT: p50 solid, p99 dashed", ylabel="milliseconds")
        goodput.set(title="Requests within the SLO", ylabel="percent", ylim=(0, 103))
        goodput.axhline(99, color="#888", linestyle=":")
        goodput.legend(frameon=False, loc="lower left")
        _plain_ticks(ttft, "y")
        return _svg(figure)


def _drawn(seconds: float) -> float:
    """Milliseconds; what is infinite is not drawn."""
    return seconds * 1e3 if np.isfinite(seconds) else np.nan


def _row(figure: Figure, count: int) -> list[Axes]:
    return [figure.add_subplot(1, count, i + 1) for i in range(count)]


def _colour(group: PooledRuns, labels: Sequence[str]) -> str:
    return _COLOURS[list(labels).index(group.label) % len(_COLOURS)]


def _plain_ticks(axes: Axes, which: str = "x") -> None:
    axis = axes.xaxis if which == "x" else axes.yaxis
    if not axes.has_data() or not np.isfinite(axes.dataLim.get_points()).all():
        # Nothing was answered, so nothing is drawn, and a logarithmic axis would have no limits.
        axis.set_ticks([])
        axes.set_xscale("linear")
        axes.set_yscale("linear")
        return
    axis.set_major_formatter(mpl.ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    low, high = axis.get_view_interval()
    # If an axis spans less than two decades, labels at powers of ten alone leave it without
    # numbers.
    formatter = mpl.ticker.FuncFormatter(lambda value, _: f"{value:g}")
    subs = (2.0, 5.0) if high > 6 * max(low, 1e-9) else (1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0)
    axis.set_minor_locator(mpl.ticker.LogLocator(subs=subs))
    axis.set_minor_formatter(
        formatter if high < 300 * max(low, 1e-9) else mpl.ticker.NullFormatter()
    )


def _svg(figure: Figure) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]

"""Bars of the realized fraction of each phase of each model."""

from typing import Any

from matplotlib.figure import Figure

from benchmarks.common.figures import BLUE, GREEN, GREY, ORANGE, PINK, SKY, axes_grid, drawn

_COLOURS = (ORANGE, SKY, BLUE, GREEN, PINK)
_LEAST, _MOST = -1.0, 1.5  # the visible range; a misaligned model may be far below


def plot(result: dict[str, Any]) -> str:
    """SVG with a group of bars for each compressed model; 1 is the whole ideal gain."""
    _, svg = drawn(_draw, result)
    return svg


def _draw(result: dict[str, Any]) -> tuple[str, Figure]:
    rows = [row for row in result["models"] if row["name"] != "dense"]
    figure, (axes,) = axes_grid(11, 4.5)
    phases = list(result["models"][0]["phases"])
    width = 0.8 / len(phases)
    for number, (phase, colour) in enumerate(zip(phases, _COLOURS, strict=True)):
        places = [place + (number - (len(phases) - 1) / 2) * width for place in range(len(rows))]
        realized = [row["phases"][phase]["realized"] for row in rows]
        heights = [0 if x is None else min(max(x, _LEAST), _MOST) for x in realized]
        axes.bar(places, heights, width * 0.92, color=colour, label=phase)
        for place, value, height in zip(places, realized, heights, strict=True):
            label = "none" if value is None else f"{value:.2f}"
            axes.annotate(
                label,
                (place, max(height, 0)),
                (0, 2),
                textcoords="offset points",
                ha="center",
                fontsize=6,
                rotation=90,
            )
    axes.axhline(1, color=GREY, linewidth=1)
    axes.axhline(0, color="black", linewidth=0.8)
    axes.set_xticks(range(len(rows)), [row["name"] for row in rows], rotation=15, ha="right")
    axes.set_ylim(_LEAST if _lowest(rows) < 0 else 0, _MOST)
    axes.set_ylabel("realized: (speedup - 1) / (ideal - 1)")
    axes.set_title(f"Realized gains in time and room: {result['machine']}, {result['date']}")
    axes.legend(ncols=len(phases), loc="lower center", bbox_to_anchor=(0.5, -0.32))
    return "", figure


def _lowest(rows: list[dict[str, Any]]) -> float:
    return min((p["realized"] or 0 for row in rows for p in row["phases"].values()), default=0)

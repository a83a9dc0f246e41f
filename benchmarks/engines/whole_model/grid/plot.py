"""Speedups over the dense model in bf16: a panel a batch, a bar for each form and precision."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from benchmarks.common.figures import BLUE, GREY, ORANGE, SKY, axes_grid, drawn
from benchmarks.engines.whole_model.grid.cells import FORMS, PRECISIONS
from benchmarks.engines.whole_model.grid.compare import Measured

_COLOURS = {"bf16+bf16": GREY, "bf16+fp8": SKY, "fp8+bf16": ORANGE, "fp8+fp8": BLUE}


def plot(found: Sequence[Measured], batches: Sequence[str]) -> str:
    """SVG of the grid's forms; a cell that was not measured has no bar."""
    by_cell = {cell.name: cell for cell in found}

    def draw(_: object) -> tuple[str, Figure]:
        figure, panels = axes_grid(12, 2.3 * len(batches), rows=len(batches))
        types = sorted(("+".join(pair) for pair in PRECISIONS), key=list(_COLOURS).index)
        width = 0.8 / len(types)
        for axes, batch in zip(panels, batches, strict=True):
            for number, precision in enumerate(types):
                places, heights = [], []
                for place, form in enumerate(FORMS):
                    cell = by_cell.get(f"{form} {precision}")
                    row = cell.batches.get(batch) if cell else None
                    if row is not None and row.over_bf16 is not None:
                        places.append(place + (number - (len(types) - 1) / 2) * width)
                        heights.append(row.over_bf16)
                colour = _COLOURS[precision]
                axes.bar(places, heights, width * 0.92, color=colour, label=precision)
                for place_, height in zip(places, heights, strict=True):
                    axes.annotate(
                        f"{height:.2f}",
                        (place_, height),
                        (0, 1),
                        textcoords="offset points",
                        ha="center",
                        fontsize=6,
                    )
            axes.axhline(1, color="black", linewidth=0.8)
            axes.set_xticks(range(len(FORMS)), FORMS)
            axes.set_title(f"{batch}: speedup over dense bf16")
        panels[0].legend(ncols=len(types), title="weights+cache", loc="upper left")
        return "", figure

    return drawn(draw, None)[1]

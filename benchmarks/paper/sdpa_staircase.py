"""Attention latency over head sizes 64 to 160: the staircase (the paper's figure 3)."""

import statistics

from matplotlib.figure import Figure

from benchmarks.common.figures import BLUE, GREY, ORANGE, RED, axes_grid, by_alignment
from benchmarks.paper import reported_numbers
from benchmarks.paper.experiment import Result, run, table
from benchmarks.paper.sdpa import SHAPE, attention, inputs, refusal
from benchmarks.paper.timing import apart, kernels_of, main_kernel, timed, wake_up

# The rows of the table; the plot and the JSON file have all head sizes.
SHOWN = (
    64, 72, 80, 88, 96, 97, 104, 107, 112, 113, 119, 120, 121, 127, 128, 129, 136, 144, 152, 160,
)  # fmt: skip


def measure(tiny: bool) -> Result:
    """By head size: ms and kernels of torch's choice and of FlashAttention."""
    wake_up()
    rows = []
    for dim in range(64, 161, 8 if tiny else 1):
        tensors = inputs(dim, tiny)
        row: Result = {"dim": dim}
        for backend in ("AUTO", "FLASH"):
            call = attention(tensors, backend)
            if refusal(call) is None:
                timing = timed([call])
                kernels = kernels_of(call)
                row[backend] = {
                    "ms": timing.ms,
                    "spread": timing.spread,
                    "kernel": main_kernel(kernels),
                    "kernels": len(kernels),
                }
        rows.append(row)
        print({key: value["ms"] if key != "dim" else value for key, value in row.items()})
    return {"rows": rows}


def draw(result: Result) -> tuple[str, Figure]:
    """The figure, latencies of some head sizes, and of multiples of 8 against the others."""
    auto = {row["dim"]: row["AUTO"]["ms"] for row in result["rows"]}
    flash = {row["dim"]: row["FLASH"]["ms"] for row in result["rows"] if "FLASH" in row}
    rows = []
    for dim in (dim for dim in SHOWN if dim in auto):
        theirs = reported_numbers.STAIRCASE.get(dim)
        rows.append(
            [
                dim,
                f"{auto[dim]:.3f}",
                f"{auto[dim] / auto[96] - 1:+.0%}",
                f"{flash[dim]:.3f}" if dim in flash else None,
                theirs,
                f"{theirs / reported_numbers.STAIRCASE[96] - 1:+.0%}" if theirs else None,
            ]
        )
    columns = ["head size", "ms", "against 96", "FLASH forced, ms", "A100, ms", "A100 against 96"]
    spreads = (row[b]["spread"] for row in result["rows"] for b in ("AUTO", "FLASH") if b in row)
    text = (
        f"torch's scaled_dot_product_attention, {SHAPE}, its own choice of\nbackend. The A100's "
        f"column is the paper's. {apart(spreads)}\n\n{table(columns, rows)}\n"
        f"{_summary(auto)}\n{_kernels(result)}"
    )
    return text, _figure(auto, flash)


def _summary(auto: dict[int, float]) -> str:
    rows = []
    for name, aligned in (("multiples of 8", True), ("others", False)):
        below = [ms for dim, ms in auto.items() if (dim % 8 == 0) == aligned and dim <= 128]
        near = [ms for dim, ms in auto.items() if (dim % 8 == 0) == aligned and 104 <= dim <= 128]
        if below and near:
            low, high = reported_numbers.STAIRCASE_RANGES[name]
            rows.append(
                [
                    name,
                    f"{min(below):.2f}-{max(below):.2f}",
                    f"{statistics.mean(near):.3f}",
                    f"{low}-{high}",
                    reported_numbers.STAIRCASE_MEANS[name],
                ]
            )
    columns = ["head sizes", "ms, 64-128", "mean ms, 104-128", "A100, ms", "A100 mean, 104-128"]
    return table(columns, rows)


def _kernels(result: Result) -> str:
    """The longest kernel of each head size; sizes that share one are listed together."""
    groups: dict[str, list[int]] = {}
    for row in result["rows"]:
        if row["AUTO"]["kernel"]:
            kernel = f"{row['AUTO']['kernel']} ({row['AUTO']['kernels']} kernels a call)"
            groups.setdefault(kernel, []).append(row["dim"])
    rows = [[f"`{kernel}`", _ranges(dims)] for kernel, dims in groups.items()]
    return table(["kernel that took longest", "head sizes"], rows) if rows else ""


def _ranges(dims: list[int]) -> str:
    """[64, 72, 97, 98, 99] -> "64, 72, 97-99"."""
    runs: list[list[int]] = []
    for dim in dims:
        if runs and dim == runs[-1][-1] + 1:
            runs[-1].append(dim)
        else:
            runs.append([dim])
    return ", ".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)


def _figure(auto: dict[int, float], flash: dict[int, float]) -> Figure:
    figure, (axes,) = axes_grid(8.5, 3.8)
    dims = list(auto)
    axes.plot(dims, list(auto.values()), color=BLUE, linewidth=0.8, alpha=0.6)
    axes.scatter(dims, list(auto.values()), c=by_alignment(dims), s=12, zorder=3)
    axes.plot(list(flash), list(flash.values()), color=ORANGE, linewidth=0.9, linestyle="--")
    axes.plot(
        list(reported_numbers.STAIRCASE), list(reported_numbers.STAIRCASE.values()), "x", color=GREY
    )
    axes.set(
        title="Attention latency over head sizes",
        xlabel="head size",
        ylabel="milliseconds",
        ylim=(0, None),
        xticks=range(64, 161, 8),
    )
    axes.scatter([], [], color=BLUE, s=12, label="multiples of 8")
    axes.scatter([], [], color=RED, s=12, label="others")
    axes.plot([], [], "--", color=ORANGE, linewidth=0.9, label="FlashAttention forced")
    axes.plot([], [], "x", color=GREY, label="A100, the paper's")
    axes.legend(loc="upper left", ncols=2)
    return figure


if __name__ == "__main__":
    run("Attention latency over head sizes", measure, draw)

"""Minimal, optimal and predefined repair of PaLU's head sizes (the paper's tables 7, 8 and 9)."""

import statistics
from collections.abc import Callable, Iterable, Mapping

import numpy as np
from matplotlib.figure import Figure

from benchmarks.common.figures import BLUE, GREY, ORANGE, axes_grid
from benchmarks.paper import reported_numbers
from benchmarks.paper.experiment import Result, run, table
from benchmarks.paper.sdpa import SHAPE, attention, inputs
from benchmarks.paper.timing import timed, wake_up
from vllm_gac.alignment.rules import align
from vllm_gac.layout.schema import Strategy

STRATEGIES: tuple[Strategy, ...] = ("minimal", "optimal", "predefined")
# The misaligned sizes of table 8. Their mean gain, per memory, is the ROI of table 7.
JUDGED = (114, 117, 121, 125)


def measure(tiny: bool) -> Result:
    """Latency of every head size from 104 to 128, by torch's own choice of backend."""
    wake_up()
    times = {dim: timed([attention(inputs(dim, tiny))]) for dim in range(104, 129)}
    print({dim: timing.ms for dim, timing in times.items()})
    return {
        "ms": {dim: timing.ms for dim, timing in times.items()},
        "spread": max(timing.spread for timing in times.values()),
    }


def repaired(dim: int, strategy: Strategy) -> int:
    """The head size that `dim` is padded to."""
    return align(dim, strategy, "head")


def overhead(heads: Mapping[int, int], repair: Callable[[int], int]) -> float:
    """The share of memory that repair adds to `heads`, the number of heads by size."""
    before = sum(dim * count for dim, count in heads.items())
    return sum(repair(dim) * count for dim, count in heads.items()) / before - 1


def mean_gain(ms: Mapping[int, float], repair: Callable[[int], int], dims: Iterable[int]) -> float:
    """The share of latency that repair gains, as a mean over `dims`."""
    return statistics.mean(1 - ms[repair(dim)] / ms[dim] for dim in dims)


def draw(result: Result) -> tuple[str, Figure]:
    """Tables 7, 8 and 9, and figure 5."""
    ms = {int(dim): time for dim, time in result["ms"].items()}
    text = (
        f"Attention: {SHAPE}. Memory: 512 KV heads of Llama-3-8B as PaLU leaves them at a ratio\n"
        "of 0.8, by the counts in the authors' repository; the sizes are repaired by this "
        "project's\n`vllm-gac align --role head`. "
        f"Trials of a point are {result['spread']:.1%} apart at most.\n\n"
        f"## Memory, latency, and one per the other (table 7)\n\n{_table_7(ms)}\n"
        f"## Latency by head size (table 8)\n\n{_table_8(ms)}\n"
        f"## Repaired sizes (table 9)\n\n{_table_9()}"
    )
    return text, _figure(ms)


def _table_7(ms: Mapping[int, float]) -> str:
    everyone = [dim for dim, count in reported_numbers.PALU_HEADS.items() for _ in range(count)]
    rows = []
    for strategy in STRATEGIES:
        repair = _repair(strategy)
        memory = overhead(reported_numbers.PALU_HEADS, repair)
        gain = mean_gain(ms, repair, JUDGED)
        theirs = reported_numbers.ROI.get(strategy)
        rows.append(
            [
                strategy,
                f"{memory:.2%}",
                f"{gain:.1%}",
                f"{gain / memory:.1f}x",
                f"{mean_gain(ms, repair, everyone):.1%}",
                f"{reported_numbers.OVERHEAD[strategy]:.2f}%" if theirs else None,
                f"{_their_gain(strategy):.1%}" if theirs else None,
                f"{theirs}x" if theirs else None,
            ]
        )
    columns = ["strategy", "memory", f"latency gained, mean of {JUDGED}", "ROI", "all 512 heads"]
    return table([*columns, "A100: memory", "latency gained", "ROI"], rows)


def _their_gain(strategy: str) -> float:
    """The mean gain in the paper's table 8, over the same head sizes."""
    column = ("minimal", "optimal").index(strategy) + 1
    return statistics.mean(
        1 - reported_numbers.REPAIR[dim][column] / reported_numbers.REPAIR[dim][0] for dim in JUDGED
    )


def _repair(strategy: Strategy) -> Callable[[int], int]:
    return lambda dim: repaired(dim, strategy)


def _table_8(ms: Mapping[int, float]) -> str:
    rows = []
    for dim, theirs in reported_numbers.REPAIR.items():
        times = [ms[dim], ms[repaired(dim, "minimal")], ms[repaired(dim, "optimal")]]
        row: list[object] = [dim]
        for original, *others in (times, theirs):
            row += [f"{t:.3f}" for t in (original, *others)]
            row += [f"{1 - t / original:+.1%}" for t in others]
        rows.append(row)
    columns = ["original", "minimal", "optimal", "gain, minimal", "gain, optimal"]
    return table(["head size", *(f"{c}, ms" for c in columns[:3]), *columns[3:],
                  *(f"A100: {c}" for c in columns)], rows)  # fmt: skip


def _table_9() -> str:
    rows = []
    for dim, count in reported_numbers.PALU_HEADS.items():
        rows.append(
            [dim, count, *(f"{(to := repaired(dim, s))} (+{to - dim})" for s in STRATEGIES)]
        )
    return table(["PaLU's head size", "heads", *STRATEGIES], rows)


def _figure(ms: Mapping[int, float]) -> Figure:
    figure, (axes,) = axes_grid(7.5, 4.2)
    dims = sorted({107, *reported_numbers.PALU_HEADS})
    for strategy, colour, marker in (("minimal", BLUE, "o"), ("optimal", ORANGE, "s")):
        repair = _repair(strategy)  # type: ignore[arg-type]
        points = [(100 * (repair(d) / d - 1), 100 * (1 - ms[repair(d)] / ms[d])) for d in dims]
        axes.scatter(*zip(*points, strict=True), color=colour, marker=marker, s=28, label=strategy)
        column = 1 if strategy == "minimal" else 2
        theirs = [
            (100 * (repair(dim) / dim - 1), 100 * (1 - times[column] / times[0]))
            for dim, times in reported_numbers.REPAIR.items()
        ]
        axes.scatter(
            *zip(*theirs, strict=True),
            facecolors="none",
            edgecolors=colour,
            marker=marker,
            s=28,
            label=f"{strategy}, A100",
        )
    memory = np.linspace(0, 13, 50)
    for ratio in (2, 5, 10, 20):
        axes.plot(memory, ratio * memory, "--", color=GREY, linewidth=0.6, zorder=0)
        x = min(12.2, 66 / ratio)
        axes.text(x, ratio * x, f"{ratio}x", color=GREY, size=7.5, ha="right", va="bottom")
    axes.set(
        title="What repair gains and costs, by head size",
        xlabel="memory added, percent",
        ylabel="latency gained, percent",
        xlim=(-0.4, 13),
        ylim=(-5, 75),
    )
    axes.legend(ncols=2, loc="center", bbox_to_anchor=(0.64, 0.55))
    return figure


if __name__ == "__main__":
    run("Repair of PaLU's head sizes", measure, draw)

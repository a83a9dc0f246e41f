"""Costs and gains of padding with zeros (the paper's table 5), also for GEMMs."""

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import TypeAlias

import torch
from matplotlib.figure import Figure
from torch.nn.functional import linear, pad, silu

from benchmarks.common.figures import axes_grid, by_alignment
from benchmarks.paper import reported_numbers
from benchmarks.paper.experiment import Result, run, table
from benchmarks.paper.sdpa import attention, inputs
from benchmarks.paper.timing import apart, copies_past_l2, timed, wake_up

Call: TypeAlias = Callable[[], torch.Tensor]

HEADS = (107, 112, 120, 128)
# A low-rank linear of 4096 x 4096, and the MLP of a Llama-3-8B pruned by 15 %.
RANKS, WIDTHS = (1001, 1002, 1008, 1024), (12185, 12186, 12192, 12288)
HIDDEN = 4096
TOKENS = (1, 64, 2048)


def measure(tiny: bool) -> Result:
    """Times of the first dim of each series and of its paddings, and differences of outputs."""
    wake_up()
    tokens = (1, 4) if tiny else TOKENS
    hidden, ranks, widths = (64, (25, 32), (41, 48)) if tiny else (HIDDEN, RANKS, WIDTHS)
    series = {"attention, head size": _attention(tiny)}
    for m in tokens:
        series[f"low-rank linear, rank, {_counted(m)}"] = _padded(
            ranks, lambda dim, m=m: _low_rank(m, hidden, ranks[0], dim)
        )
        series[f"MLP, width, {_counted(m)}"] = _padded(
            widths, lambda dim, m=m: _mlp(m, hidden, widths[0], dim)
        )
    return {"series": series}


def _counted(tokens: int) -> str:
    return "1 token" if tokens == 1 else f"{tokens} tokens"


def _attention(tiny: bool) -> list[Result]:
    tensors = inputs(HEADS[0], tiny)
    scale = HEADS[0] ** -0.5

    def calls(dim: int) -> list[Call]:
        padded = [pad(tensor, (0, dim - HEADS[0])) for tensor in tensors]
        call = attention((padded[0], padded[1], padded[2]), scale=scale)
        return [lambda: call()[..., : HEADS[0]]]

    return _padded(HEADS, calls)


def _padded(dims: Sequence[int], calls_of: Callable[[int], list[Call]]) -> list[Result]:
    """Time of each dim, and the relative difference of its output from the first dim's."""
    rows = []
    expected: torch.Tensor | None = None
    for dim in dims:
        torch.manual_seed(0)  # equal weights and inputs except for the padding
        calls = calls_of(dim)
        output = calls[0]().float()
        expected = output if expected is None else expected
        difference = float((output - expected).norm() / expected.norm())
        timing = timed(calls)
        rows.append(
            {"dim": dim, "ms": timing.ms, "spread": timing.spread, "difference": difference}
        )
        print(rows[-1])
    return rows


def _low_rank(tokens: int, hidden: int, rank: int, padded: int) -> list[Call]:
    """x -> A x -> B A x of rank `rank`, padded with zeros to `padded`."""

    def one() -> Call:
        x = _random(tokens, hidden)
        down = pad(_random(rank, hidden), (0, 0, 0, padded - rank))
        up = pad(_random(hidden, rank), (0, padded - rank))
        return lambda: linear(linear(x, down), up)

    return [one() for _ in range(copies_past_l2(4 * hidden * padded))]


def _mlp(tokens: int, hidden: int, width: int, padded: int) -> list[Call]:
    """A gated MLP of `width` channels, padded with zero channels to `padded`."""

    def one() -> Call:
        x = _random(tokens, hidden)
        gate, up = (pad(_random(width, hidden), (0, 0, 0, padded - width)) for _ in range(2))
        both = torch.cat((gate, up))
        down = pad(_random(hidden, width), (0, padded - width))

        def call() -> torch.Tensor:
            gated, raised = linear(x, both).chunk(2, -1)
            return linear(silu(gated) * raised, down)

        return call

    return [one() for _ in range(copies_past_l2(6 * hidden * padded))]


def _random(rows: int, columns: int) -> torch.Tensor:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.randn(rows, columns, device=device, dtype=torch.float16) / columns**0.5


def draw(result: Result) -> tuple[str, Figure]:
    """The paper's table for each series; that of attention has the paper's numbers, too."""
    sections = []
    for name, rows in result["series"].items():
        base = rows[0]
        cells = []
        for row in rows:
            overhead = row["dim"] / base["dim"] - 1
            gain = 1 - row["ms"] / base["ms"]
            theirs = reported_numbers.PADDING.get(row["dim"]) if "head size" in name else None
            cells.append(
                [
                    row["dim"],
                    f"{overhead:.2%}",
                    f"{row['ms']:.4f}" if row["ms"] < 0.3 else f"{row['ms']:.3f}",
                    f"{base['ms'] / row['ms']:.2f}x",
                    f"{gain / overhead:.0f}x" if overhead else None,
                    f"{row['difference']:.1e}",
                    theirs,
                    f"{reported_numbers.PADDING[base['dim']] / theirs:.2f}x" if theirs else None,
                ]
            )
        columns = ["dim", "memory", "ms", "speedup", "ROI", "difference", "A100, ms", "A100"]
        # A memory overhead of a tenth of a percent gives no meaningful ratio.
        used = range(8) if "head size" in name else (0, 1, 2, 3, 5)
        page = table([columns[i] for i in used], [[row[i] for i in used] for row in cells])
        sections.append(f"## {name}\n\n{page}")
    spreads = [row["spread"] for rows in result["series"].values() for row in rows]
    text = (
        "fp16. Attention: B=4, S=2048, H=32, not causal, torch's own choice of backend. Low rank: "
        f"{HIDDEN} -> rank -> {HIDDEN}.\nMLP: {HIDDEN} -> 2 x width -> {HIDDEN}, with its "
        "activation, written in torch. Weights are rotated past the L2.\nROI: share of the "
        "latency gained per share of memory spent. Difference: of the padded output from the\n"
        f"unpadded, relative, in fp16. {apart(spreads)}\n\n"
    )
    return text + "\n".join(sections), _figure(result["series"])


def _figure(series: Result) -> Figure:
    figure, all_axes = axes_grid(10.5, 5.2, rows=2, columns=4)
    for axes, found in zip_longest(all_axes, series.items()):
        if found is None:
            axes.set_visible(False)
            continue
        name, rows = found
        dims = [row["dim"] for row in rows]
        times = [1e3 * row["ms"] for row in rows]
        bars = axes.bar(range(len(dims)), times, color=by_alignment(dims))
        labels = [f"{times[0] / t:.2f}x" for t in times]
        axes.bar_label(bars, labels, size=7.5)
        axes.set_xticks(range(len(dims)), [str(dim) for dim in dims])
        axes.grid(axis="x", visible=False)
        axes.set_ylabel("microseconds")
        axes.set_title(name.replace(", ", "\n", 1), fontsize=8.5)
    return figure


if __name__ == "__main__":
    run("Padding with zeros", measure, draw)

"""GEMM throughput over K and N: around 4096, and at the paper's small K (tables 4 and 6)."""

import statistics
from collections.abc import Iterable

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.common.figures import BLUE, GREY, ORANGE, axes_grid, by_alignment
from benchmarks.paper import reported_numbers
from benchmarks.paper.experiment import Result, run, table
from benchmarks.paper.gemm import Layout, alignment, class_name, products, tflops
from benchmarks.paper.timing import apart, kernels_of, main_kernel, timed, wake_up

# (4096, 4096, 4096) with one dim swept.
SIDE = 4096
AROUND = range(SIDE - 64, SIDE + 65)
SMALL_K = range(96, 129)
# K in steps of 8: a kernel's loop over K takes 64 elements at once.
STEPS_K = range(512, 769, 8)


def measure(tiny: bool) -> Result:
    """The times of all points of the sweeps."""
    wake_up()
    side = 64 if tiny else SIDE
    large, some = (side if tiny else 8192), (8 if tiny else 1)
    around = AROUND[::some]
    small = SMALL_K[::some]
    return {
        "K": _sweep(((side, side, k) for k in around), name_kernels=True),
        "N": _sweep(((side, n, side) for n in around), name_kernels=True),
        "small K, 8192": _sweep((large, large, k) for k in small),
        "small K, 8192, matmul": _sweep(((large, large, k) for k in small), "matmul"),
        "small K, 4096": _sweep((side, side, k) for k in small),
        "small K, 4096, matmul": _sweep(((side, side, k) for k in small), "matmul"),
        "K in steps of 8": _sweep((side, side, k) for k in STEPS_K),
    }


def _sweep(
    shapes: Iterable[tuple[int, int, int]], layout: Layout = "linear", name_kernels: bool = False
) -> list[Result]:
    rows = []
    for m, n, k in shapes:
        calls = products(m, n, k, layout)
        timing = timed(calls)
        rows.append(
            {
                "M": m, "N": n, "K": k, "ms": timing.ms, "spread": timing.spread,
                "tflops": tflops(m, n, k, timing.ms),
            }
        )  # fmt: skip
        if name_kernels:
            rows[-1]["kernel"] = main_kernel(kernels_of(calls[0]))
        print(layout, rows[-1])
    return rows


def draw(result: Result) -> tuple[str, Figure]:
    """Throughput by alignment, the paper's tables for small K, and multiples of 8 against 64."""
    spreads = [row["spread"] for name, rows in result.items() if name != "run" for row in rows]
    text = (
        "fp16, inputs rotated past the L2; a linear layer (`x @ w.T`) unless said.\n"
        f"{apart(spreads)}\n\n"
        f"## Around 4096\n\n{_classes(result)}\n{_kernel_names(result)}\n"
        f"## Small K (tables 4 and 6, section 4.3)\n\n{_small_k(result)}\n{_loads(result)}\n"
        f"{_milliseconds(result)}\n## Multiples of 8, 16, 32 and 64 of K\n\n{_steps(result)}"
    )
    return text, _figure(result)


def _classes(result: Result) -> str:
    rows = []
    for swept in ("K", "N"):
        for aligned in (1, 2, 4, 8, 16, 32, 64):
            found = [r["tflops"] for r in result[swept] if alignment(r[swept]) == aligned]
            if found:
                best = statistics.mean(r["tflops"] for r in result[swept] if r[swept] % 8 == 0)
                mean = statistics.mean(found)
                numbers = [f"{min(found):.0f}", f"{mean:.0f}", f"{max(found):.0f}"]
                rows.append([swept, class_name(aligned), *numbers, f"{best / mean:.1f}x"])
    columns = [f"swept, {AROUND[0]}-{AROUND[-1]}", "largest power of two in it", "min TFLOP/s"]
    return table([*columns, "mean", "max", "slower than multiples of 8"], rows)


def _kernel_names(result: Result) -> str:
    """The kernels of each alignment; cuBLAS has several."""
    rows = []
    for swept in ("K", "N"):
        for name, wanted in (("odd", (1,)), ("2, 4", (2, 4)), ("8+", (8, 16, 32, 64))):
            found = {r["kernel"] for r in result[swept] if alignment(r[swept]) in wanted}
            kernels = sorted(kernel for kernel in found if kernel)
            if kernels:
                shown = ", ".join(f"`{kernel}`" for kernel in kernels[:3])
                rows.append([swept, name, shown + (" ..." if len(kernels) > 3 else "")])
    return table(["swept", "largest power of two", "kernels"], rows) if rows else ""


def _small_k(result: Result) -> str:
    groups = {
        "multiples of 16": lambda k: k % 16 == 0,
        "multiples of 8": lambda k: k % 16 == 8,
        "others": lambda k: k % 8 != 0,
    }
    rows = []
    for name, belongs in groups.items():
        row = [name]
        for sweep in ("small K, 8192, matmul", "small K, 8192"):
            found = [r["tflops"] for r in result[sweep] if belongs(r["K"]) and r["K"] >= 104]
            row.append(
                f"{statistics.mean(found):.0f} ({min(found):.0f}-{max(found):.0f})"
                if found
                else "-"
            )
        rows.append([*row, reported_numbers.SMALL_K[name]])
    columns = ["(8192, 8192, K), K 104-128", "mean TFLOP/s, `a @ b`", "`x @ w.T`", "A100, `a @ b`"]
    note = "\nWriting the product (128 MiB) takes most of the time: TFLOP/s grow with K.\n"
    return table(columns, rows) + note


def _loads(result: Result) -> str:
    rows = []
    for name, (ks, theirs) in reported_numbers.LOADS.items():
        row: list[object] = [name, ", ".join(map(str, ks))]
        for sweep in ("small K, 4096, matmul", "small K, 4096"):
            found = [r["tflops"] for r in result[sweep] if r["K"] in ks]
            row.append(f"{min(found):.0f}-{max(found):.0f}" if found else None)
        rows.append([*row, theirs])
    columns = ["loads on the A100", "K", "(4096, 4096, K) TFLOP/s, `a @ b`", "`x @ w.T`"]
    return table([*columns, "A100, `a @ b`"], rows)


def _milliseconds(result: Result) -> str:
    sweeps = {s: {r["K"]: r["ms"] for r in result[f"small K, 4096{s}"]} for s in (", matmul", "")}
    rows = []
    for k, theirs in reported_numbers.GEMM_MS.items():
        row: list[object] = [k]
        for ms in sweeps.values():
            known = k in ms and 107 in ms
            row += [f"{ms[k]:.4f}", f"{ms[107] / ms[k]:.2f}x"] if known else [None, None]
        rows.append([*row, theirs, f"{reported_numbers.GEMM_MS[107] / theirs:.2f}x"])
    columns = ["K of (4096, 4096, K)", "`a @ b`, ms", "against 107", "`x @ w.T`, ms", "against 107"]
    return table([*columns, "A100, ms", "against 107"], rows)


def _steps(result: Result) -> str:
    """How far the times of an alignment are above the line through the multiples of 64."""
    rows = result["K in steps of 8"]
    whole = [(r["K"], r["ms"]) for r in rows if r["K"] % 64 == 0]
    slope, intercept = statistics.linear_regression(*zip(*whole, strict=True))
    cells = []
    for aligned in (8, 16, 32, 64):
        found = [r for r in rows if alignment(r["K"]) == aligned]
        over = statistics.mean(r["ms"] / (slope * r["K"] + intercept) - 1 for r in found)
        speed = statistics.mean(r["tflops"] for r in found)
        cells.append([class_name(aligned), f"{speed:.0f}", f"{over:+.1%}"])
    columns = [f"(4096, 4096, K), K {STEPS_K[0]}-{STEPS_K[-1]}: largest power of two in K"]
    return table([*columns, "mean TFLOP/s", "time above the line through multiples of 64"], cells)


def _figure(result: Result) -> Figure:
    figure, (k, n, small, steps) = axes_grid(10.5, 6.4, rows=2, columns=2)
    for axes, swept in ((k, "K"), (n, "N")):
        _scatter(axes, result[swept], swept)
        axes.set(title=f"{swept} around 4096, the other dims 4096", xlabel=swept)
    _scatter(small, result["small K, 8192, matmul"], "K")
    theirs = [(104, 76.8), (107, 38.5), (112, 91.1), (120, 76.8), (128, 91.1)]
    small.plot(*zip(*theirs, strict=True), "x", color=GREY, label="A100 (means)")
    small.set(title="(8192, 8192, K), a @ b, the paper's", xlabel="K", xticks=SMALL_K[::8])
    small.legend(loc="center left")
    rows = result["K in steps of 8"]
    steps.plot([r["K"] for r in rows], [r["ms"] for r in rows], "o-", color=ORANGE, markersize=3)
    whole = [r for r in rows if r["K"] % 64 == 0]
    steps.plot(
        [r["K"] for r in whole],
        [r["ms"] for r in whole],
        "o",
        color=BLUE,
        markersize=6,
        label="multiples of 64",
    )
    steps.set(title="(4096, 4096, K), multiples of 8", xlabel="K", ylabel="milliseconds")
    steps.set_xticks([r["K"] for r in whole])
    steps.legend(loc="upper left")
    return figure


def _scatter(axes: Axes, rows: list[Result], swept: str) -> None:
    dims = [row[swept] for row in rows]
    axes.scatter(dims, [row["tflops"] for row in rows], c=by_alignment(dims), s=10)
    axes.set(ylabel="TFLOP/s", ylim=(0, None))


if __name__ == "__main__":
    run("GEMM throughput over K and N", measure, draw)

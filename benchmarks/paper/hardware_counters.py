"""What the hardware does with misaligned dims: the paper's hypotheses H1 to H4 (table 3).

Measures times, and hardware counters where Nsight Compute (ncu) may read them.
"""

import statistics
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

import torch
from matplotlib.figure import Figure

from benchmarks.common.figures import BLUE, GREY, axes_grid, by_alignment
from benchmarks.paper import reported_numbers
from benchmarks.paper.experiment import Result, run, table
from benchmarks.paper.gemm import products, tflops
from benchmarks.paper.hardware_cases import CASES, MARKER, Case
from benchmarks.paper.ncu import RefusedError, load_bytes, profile
from benchmarks.paper.sdpa import attention, inputs, nbytes
from benchmarks.paper.timing import kernels_of, listed, timed, wake_up

WORK = Path("build/seeds")
SECTOR = 32  # bytes, of an L2
# A hypothesis is confirmed if it costs at least this share.
CONFIRMED = 0.10


def measure(tiny: bool) -> Result:
    """Times of the paper's sweeps; then times, kernels and counters of every case."""
    wake_up()
    times = {
        "H1": _gemms(range(104, 129), 64 if tiny else 8192),
        "H2": _gemms(range(104, 129), 64 if tiny else 2048),
        "H3": {
            dim: timed([attention(inputs(dim, tiny))]).ms for dim in reported_numbers.BANDWIDTH_MS
        },
        "H4": _gemms((104, 105, 106, 107, 108, 112, 116, 120, 124, 128), 64 if tiny else 4096),
    }
    cases = []
    for case in CASES:
        calls = case.calls(tiny)
        timing = timed(calls)
        cases.append({"ms": timing.ms, "kernels": kernels_of(calls[0])})
        print(case.label, cases[-1])
        del calls
    torch.cuda.empty_cache()
    return {
        "times": times,
        "peak_tflops": _peak(tiny),
        "cases": {case.label: found for case, found in zip(CASES, cases, strict=True)},
        **_counters(),
    }


def _gemms(ks: range | tuple[int, ...], side: int) -> dict[int, float]:
    """Milliseconds of a @ b with (side, side, K), by K."""
    return {k: timed(products(side, side, k, "matmul")).ms for k in ks}


def _peak(tiny: bool) -> float:
    side = 64 if tiny else 8192
    return tflops(side, side, side, timed(products(side, side, side, "linear")).ms)


def _counters() -> Result:
    """Counters and opcodes of the kernels of each case, or why there are none."""
    WORK.mkdir(parents=True, exist_ok=True)
    try:
        found = profile("benchmarks.paper.hardware_cases", MARKER, WORK)
    except RefusedError as error:
        return {"ncu": f"refused: {error}", "counters": {}}
    kernels = {
        case.label: [asdict(kernel) for kernel in seen]
        for case, seen in zip(CASES, found, strict=True)
    }
    return {"ncu": "read", "counters": kernels}


def draw(result: Result) -> tuple[str, Figure]:
    """Table 3, and its evidence: throughput, instructions, loads and traffic of each case."""
    text = (
        f"Hardware counters: {result['ncu']}. us, TFLOP/s and counters: one launch with cold "
        "caches, as ncu sees it; of several\nkernels the counters are the longest's. us, repeated: "
        "as the other experiments time. An (8192, 8192, 8192)\nproduct, repeated: "
        f"{result['peak_tflops']:.0f} TFLOP/s. needed GB/s: inputs and output once.\n\n"
        f"## Hypotheses (table 3)\n\n{_hypotheses(result)}\n"
        f"## Matrix products\n\n{_case_table(result, attention=False)}\n"
        f"## Attention\n\n{_case_table(result, attention=True)}\n{_kernel_table(result)}"
    )
    return text, _figure(result)


def findings(result: Result) -> dict[str, tuple[float, str]]:
    """By hypothesis: the loss as a share, and the evidence of the counters ("" without them)."""
    h1, _, h3, h4 = (_times(result, name) for name in ("H1", "H2", "H3", "H4"))
    near, whole = Case(4096, 4096, 4088), Case(4096, 4096, 4096)

    def speed(ms: Mapping[int, float], belongs: Callable[[int], bool]) -> float:
        return statistics.mean(k / time for k, time in ms.items() if belongs(k))

    def milliseconds(*ks: int) -> float:
        return statistics.mean(h1[k] for k in ks)

    names = list(reported_numbers.HYPOTHESES)
    return {
        names[0]: (
            1 - speed(h1, lambda k: k % 8 != 0) / speed(h1, lambda k: k % 16 == 0),
            _change(result, _busy, *(Case(8192, 8192, k, "matmul") for k in (112, 107))),
        ),
        "H1, 8 against 16, by time": (1 - milliseconds(112, 128) / milliseconds(104, 120), ""),
        names[1]: (
            1 - near.k / whole.k * _us(result, whole) / _us(result, near),
            _change(result, _traffic_of, whole, near),
        ),
        names[2]: (
            1
            - sum(nbytes(d) / h3[d] for d in (113, 121))
            / sum(nbytes(d) / h3[d] for d in (112, 120)),
            _change(result, _padding, Case(dim=112), Case(dim=113)),
        ),
        names[3]: (
            1 - speed(h4, lambda k: k in (105, 107)) / speed(h4, lambda k: k in (112, 128)),
            _change(result, _loads_of, *(Case(8192, 8192, k, "matmul") for k in (112, 108, 107))),
        ),
    }


def _times(result: Result, name: str) -> dict[int, float]:
    return {int(dim): ms for dim, ms in result["times"][name].items()}


def _us(result: Result, case: Case) -> float:
    """Microseconds of one launch by ncu; without ncu, of the repeated launches."""
    kernels = result["counters"].get(case.label)
    if kernels is None:
        return 1e3 * float(result["cases"][case.label]["ms"])
    return 1e-3 * float(sum(kernel["counters"]["ns"] for kernel in kernels))


def _change(result: Result, told: Callable[[Result, Case], str], *cases: Case) -> str:
    """`told(result, case)` of each case, from aligned to misaligned; "" without counters."""
    if not result["counters"]:
        return ""
    return " -> ".join(f"{told(result, case)} ({case.swept})" for case in cases)


def _busy(result: Result, case: Case) -> str:
    kernel = _main(result["counters"][case.label])
    return f"tensor pipe busy {kernel['counters']['tensor_percent']:.0f}%" if kernel else "-"


def _traffic_of(result: Result, case: Case) -> str:
    return f"L2 bytes read per input byte {_traffic(result, case) or 0:.1f}"


def _padding(result: Result, case: Case) -> str:
    kernels = [kernel["counters"]["ns"] for kernel in result["counters"][case.label]]
    return f"{len(kernels)} kernels, {1 - max(kernels) / sum(kernels):.0%} of the time in padding"


def _loads_of(result: Result, case: Case) -> str:
    kernel = _main(result["counters"][case.label])
    return f"loads of {loads(kernel['opcodes'])}" if kernel else "-"


def _traffic(result: Result, case: Case) -> float | None:
    """Bytes that the SMs read from the L2 for each byte of the inputs."""
    kernels = result["counters"].get(case.label, [])
    sectors = sum(kernel["counters"].get("l2_sectors_read", 0) for kernel in kernels)
    output = case.nbytes // 4 if case.dim else 2 * case.m * case.n
    return SECTOR * sectors / (case.nbytes - output) if sectors else None


def _hypotheses(result: Result) -> str:
    rows = []
    for name, (impact, evidence) in findings(result).items():
        status, theirs = reported_numbers.HYPOTHESES.get(name, (None, None))
        judged = "confirmed" if impact >= CONFIRMED else "not confirmed"
        percent = f"{theirs:.1f}%" if theirs else None
        rows.append([name, status, percent, judged, f"{impact:.1%}", evidence or None])
    h2 = _times(result, "H2")
    speeds = {
        "multiples of 16": statistics.mean(_gbs(k, ms) for k, ms in h2.items() if k % 16 == 0),
        "others": statistics.mean(_gbs(k, ms) for k, ms in h2.items() if k % 8),
    }
    bandwidth = "; ".join(
        f"{name} {speed:.0f} GB/s (A100 {reported_numbers.L2_BANDWIDTH[name]})"
        for name, speed in speeds.items()
    )
    note = (
        "\nH1: TFLOP/s of (8192, 8192, K), K 104-128, lost against multiples of 16; by time: 104 "
        "and 120 against\n112 and 128. H2: TFLOP/s lost where one kernel reads rows that are no "
        "whole sectors, K = 4088 against\n4096. H3: GB/s of attention, 113 and 121 against 112 and "
        "120. H4: TFLOP/s of (4096, 4096, K), 105 and 107\nagainst 112 and 128. The paper's "
        f"measure for H2, (2048, 2048, K), inputs and output once:\n{bandwidth}.\n"
    )
    columns = ["hypothesis", "A100", "A100 impact", "here", "impact here", "counters"]
    return table(columns, rows) + note


def _gbs(k: int, ms: float, side: int = 2048) -> float:
    """GB/s of the inputs and the output of (side, side, K), each counted once."""
    return 2 * (2 * side * k + side * side) / ms / 1e6


def _case_table(result: Result, attention: bool) -> str:
    rows = []
    for case in (case for case in CASES if bool(case.dim) == attention):
        main = _main(result["counters"].get(case.label, []))
        counters = main["counters"] if main else {}
        us, traffic = _us(result, case), _traffic(result, case)
        busy = counters.get("tensor_percent")
        moved = sum(counters.get(name, 0) for name in ("dram_read", "dram_write"))
        rows.append(
            [
                case.label,
                f"{us:.0f}",
                f"{case.flops / us / 1e6:.0f}",
                f"{busy:.0f}%" if busy is not None else None,
                _instructions(main),
                loads(main["opcodes"]) if main else None,
                f"{traffic:.1f}" if traffic else None,
                f"{moved / counters['ns']:.0f}" if moved else None,
                f"{case.nbytes / us / 1e3:.0f}",
                f"{1e3 * result['cases'][case.label]['ms']:.0f}",
            ]
        )
    columns = ["case", "us", "TFLOP/s", "tensor pipe busy", "matrix instructions", "global loads"]
    columns += ["L2 bytes read per input byte", "DRAM GB/s", "needed GB/s", "us, repeated"]
    return table(columns, rows)


def _main(kernels: list[Result]) -> Result | None:
    """The kernel that took longest."""
    return max(kernels, key=lambda kernel: kernel["counters"].get("ns", 0), default=None)


def _instructions(kernel: Result | None) -> str | None:
    """The matrix instruction that a kernel executes most."""
    names = [op for op in (kernel or {"opcodes": {}})["opcodes"] if "MMA" in op]
    if kernel is None or not names:
        return None
    most = max(names, key=lambda op: kernel["opcodes"][op])
    kind = "WGMMA" if "GMMA" in most else "mma.sync"
    return f"{kind} (`{'.'.join(most.split('.')[:2])}`)"


def loads(opcodes: Mapping[str, int]) -> str | None:
    """How a kernel fetches operands: by TMA, or the widths of at least 5 % of its loads."""
    widths: Counter[int] = Counter()
    for opcode, count in opcodes.items():
        width = load_bytes(opcode)
        if width is not None:
            widths[width] += count
    if 0 in widths:
        return "TMA"
    common = [width for width, n in widths.most_common() if n >= 0.05 * widths.total()]
    return ", ".join(f"{width} B" for width in common) or None


def _kernel_table(result: Result) -> str:
    """All kernels of a call, by torch's profiler."""
    rows = [
        [case.label, listed(kernels)]
        for case in CASES
        if (kernels := result["cases"][case.label]["kernels"])
    ]
    return table(["case", "kernels of one call"], rows) if rows else ""


def _figure(result: Result) -> Figure:
    figure, (hypotheses, busy, traffic) = axes_grid(11, 5.2, columns=3)
    found = findings(result)
    names = list(reported_numbers.HYPOTHESES)
    for shift, colour, values, label in (
        (-0.2, GREY, [reported_numbers.HYPOTHESES[name][1] for name in names], "A100, the paper's"),
        (0.2, BLUE, [100 * found[name][0] for name in names], "this GPU"),
    ):
        places = [i + shift for i in range(len(names))]
        bars = hypotheses.bar(places, values, 0.38, color=colour, label=label)
        hypotheses.bar_label(bars, [f"{value:.0f}" for value in values], size=7.5)
    hypotheses.axhline(0, color="black", linewidth=0.6)
    hypotheses.set(title="What each hypothesis costs", ylabel="percent lost", ylim=(0, 90))
    short = ("H1\ntensor\ncores", "H2\nL2\nsectors", "H3\nattention\nbandwidth", "H4\nload\nwidth")
    hypotheses.set_xticks(range(len(names)), short)
    hypotheses.legend(loc="upper left")
    cases = list(CASES)[::-1]
    labels = [case.label.replace("`", "") for case in cases]
    colours = by_alignment([case.swept for case in cases])
    mains = [_main(result["counters"].get(case.label, [])) for case in cases]
    percents = [main["counters"].get("tensor_percent", 0) if main else 0 for main in mains]
    busy.barh(labels, percents, color=colours)
    busy.set(title="Tensor pipe busy", xlabel="percent of cycles", xlim=(0, 100))
    busy.tick_params(axis="y", labelsize=7)
    traffic.barh(labels, [_traffic(result, case) or 0 for case in cases], color=colours)
    traffic.set(title="L2 bytes read per input byte", yticklabels=[])
    return figure


if __name__ == "__main__":
    run("What the hardware does with misaligned dims", measure, draw)

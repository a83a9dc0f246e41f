"""Which attention backends take which head sizes, and how fast (the paper's tables 1 and 2)."""

import importlib
import warnings
from typing import Any

import torch
from matplotlib.figure import Figure

from benchmarks.common.figures import BLUE, GREEN, GREY, ORANGE, PINK, RED, axes_grid
from benchmarks.paper import reported_numbers
from benchmarks.paper.experiment import Result, run, table
from benchmarks.paper.sdpa import BACKENDS, SHAPE, attention, inputs, refusal
from benchmarks.paper.timing import kernels_of, listed, timed, wake_up

DIMS = (96, 104, 107, 112, 120, 128)
# The paper has 50 cases of 25 head sizes; here each size has the two 16-bit types.
TRIED = range(104, 129)
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
COLOURS = dict(zip(BACKENDS, (BLUE, ORANGE, GREEN, PINK, GREY), strict=True))


def measure(tiny: bool) -> Result:
    """Times and kernels by backend and head size, and the head sizes that a backend takes."""
    wake_up()
    times: dict[str, dict[int, Any]] = {}
    for backend in BACKENDS:
        times[backend] = {dim: _time(backend, dim, tiny) for dim in DIMS}
        print(backend, {dim: found.get("ms") for dim, found in times[backend].items()})
    taken = {
        backend: {
            name: [dim for dim in _range(name, tiny) if _takes(backend, dim, tiny, dtype)]
            for name, dtype in DTYPES.items()
        }
        for backend in BACKENDS
        if backend != "AUTO"
    }
    return {"times": times, "taken": taken, "xformers": _xformers()}


def _time(backend: str, dim: int, tiny: bool) -> Result:
    call = attention(inputs(dim, tiny), backend)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")  # torch warns why a backend refuses
        refused = refusal(call)
    if refused is not None:
        reasons = [str(w.message).split(" (Triggered")[0] for w in caught]
        return {"refused": refused, "reasons": reasons}
    timing = timed([call])
    return {"ms": timing.ms, "spread": timing.spread, "kernels": kernels_of(call)}


def _range(dtype: str, tiny: bool) -> range:
    """The head sizes to try: in fp16 those of the staircase, in bf16 those of table 2."""
    whole = range(64, 161) if dtype == "fp16" else TRIED
    return whole[::4] if tiny else whole


def _takes(backend: str, dim: int, tiny: bool, dtype: torch.dtype) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return refusal(attention(inputs(dim, tiny, dtype), backend)) is None


def _xformers() -> str:
    """The version of xformers, whose kernel MEM_EFFICIENT is, or why it is missing."""
    try:
        return str(importlib.import_module("xformers").__version__)
    except ImportError as error:
        return f"not installed ({error})"


def draw(result: Result) -> tuple[str, Figure]:
    """Tables 1 and 2, the kernels behind table 1, and plots of both."""
    text = (
        f"{SHAPE}. FAIL: the backend refuses. xformers: {result['xformers']};\n"
        "MEM_EFFICIENT is the kernel that torch took from it.\n\n"
        f"{_latency(result['times'])}\n{_availability(result['taken'])}\n"
        f"{_refusals(result['times'])}\n{_kernels(result['times'])}"
    )
    return text, _figure(result)


def _latency(times: Result) -> str:
    rows = []
    for dim in DIMS:
        theirs = [_cell(reported_numbers.BACKENDS[b][dim]) for b in reported_numbers.BACKENDS]
        rows.append([dim, *(_cell(times[b][str(dim)].get("ms")) for b in BACKENDS), *theirs])
    columns = [
        "head size",
        *(f"{b}, ms" for b in BACKENDS),
        *(f"A100 {b}" for b in reported_numbers.BACKENDS),
    ]
    return table(columns, rows)


def _cell(ms: float | None) -> str:
    return "FAIL" if ms is None else f"{ms:.3f}" if ms < 1 else f"{ms:.2f}"


def _availability(taken: Result) -> str:
    rows = []
    for backend, by_dtype in taken.items():
        counts = []
        for aligned in (True, False):
            cases = [dim for dim in TRIED if (dim % 8 == 0) == aligned]
            count = sum(dim in dims for dims in by_dtype.values() for dim in cases)
            counts.append(_share(count, len(by_dtype) * len(cases)))
        theirs = reported_numbers.AVAILABILITY.get(backend)
        rows.append([backend, *counts, *([_share(*part) for part in theirs] if theirs else "--")])
    columns = ["backend, sizes 104-128", "multiples of 8", "others", "A100: multiples of 8"]
    return table([*columns, "A100: others"], rows)


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%} ({part}/{whole})"


def _refusals(times: Result) -> str:
    rows = [
        [backend, dim, "; ".join(dict.fromkeys([found["refused"], *found["reasons"]]))]
        for backend, by_dim in times.items()
        for dim, found in by_dim.items()
        if "refused" in found
    ]
    return table(["refused by", "head size", "what torch says"], rows) if rows else ""


def _kernels(times: Result) -> str:
    rows = [
        [backend, dim, listed(kernels)]
        for backend in ("AUTO", "FLASH", "MEM_EFFICIENT", "cuDNN")
        for dim in (107, 112)
        if (kernels := times[backend][str(dim)].get("kernels"))
    ]
    return table(["backend", "head size", "kernels of one call"], rows) if rows else ""


def _figure(result: Result) -> Figure:
    figure, (latency, availability) = axes_grid(10.5, 3.6, columns=2)
    width = 0.16
    for i, backend in enumerate(BACKENDS):
        for x, dim in enumerate(DIMS):
            place, ms = x + (i - 2) * width, result["times"][backend][str(dim)].get("ms")
            if ms is None:
                style: Any = {"rotation": 90, "ha": "center", "va": "bottom", "size": 7}
                latency.text(place, 0.22, "refuses", color=RED, **style)
            else:
                latency.bar(place, ms, width, color=COLOURS[backend])
        latency.bar(0, 0, width, color=COLOURS[backend], label=backend)
    latency.set(
        title="Latency by backend",
        xlabel="head size",
        ylabel="milliseconds (log)",
        yscale="log",
        ylim=(0.2, 60),
    )
    latency.set_xticks(range(len(DIMS)), [str(dim) for dim in DIMS])
    latency.legend(ncols=3, loc="upper left", fontsize=8)
    names = list(result["taken"])
    for y, backend in enumerate(names):
        taken = result["taken"][backend]["fp16"]
        availability.scatter(taken, [y] * len(taken), marker="|", s=90, color=COLOURS[backend])
    availability.set(
        title="Head sizes that a backend takes (fp16)",
        xlabel="head size",
        xticks=range(64, 161, 16),
        ylim=(-0.6, len(names) - 0.4),
    )
    availability.set_yticks(range(len(names)), names)
    return figure


if __name__ == "__main__":
    run("Attention backends over head sizes", measure, draw)

"""How long a call keeps the GPU busy, and with which kernels."""

import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch.autograd import DeviceType

Call: TypeAlias = Callable[[], object]

# Inputs are rotated until so many bytes lie between two uses of one: several times an L2.
_PAST_L2 = 192 << 20
_TRIALS, _WARM_UPS, _TRIAL_MS, _MOST_ROUNDS = 7, 3, 3.0, 40
# Short on purpose: a GPU that multiplies matrices for longer meets its power limit, and its clocks
# then say more about the minute before than about the kernel.
METHOD = f"median of {_TRIALS} trials of {_TRIAL_MS:.0f} ms, CUDA graphs, {_WARM_UPS} warm-ups"


@dataclass(frozen=True, slots=True)
class Timing:
    """Median of the trials, and how far they are apart as a share of it."""

    ms: float
    spread: float


def copies_past_l2(nbytes: int) -> int:
    """How many inputs of `nbytes` to rotate through, so that none is found in the L2."""
    return math.ceil(_PAST_L2 / nbytes) if torch.cuda.is_available() else 1


def timed(calls: Sequence[Call]) -> Timing:
    """Time of one call; `calls` do the same on inputs of their own.

    Replays of a CUDA graph that runs them in turn: no launch gaps, clocks up, no warm L2.
    """
    if not torch.cuda.is_available():
        return _timed_on_cpu(calls)
    for call in calls:
        call()  # compiles, plans, allocates
    rounds = max(1, min(_MOST_ROUNDS, round(_TRIAL_MS / max(_elapsed(calls), 1e-3))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    for _ in range(_WARM_UPS):
        graph.replay()
    trials = [_elapsed([graph.replay]) / (rounds * len(calls)) for _ in range(_TRIALS)]
    del graph
    torch.cuda.empty_cache()  # a graph's memory is its own until then
    middle = statistics.median(trials)
    return Timing(middle, (max(trials) - min(trials)) / middle)


def apart(spreads: Iterable[float]) -> str:
    """A sentence on how far the trials of many points are apart."""
    found = sorted(spreads)
    middle = statistics.median(found)
    return f"Trials of a point are {middle:.1%} apart in the median, {found[-1]:.1%} at most."


def _elapsed(calls: Sequence[Call]) -> float:
    """Milliseconds between two events around all `calls`."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for call in calls:
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def _timed_on_cpu(calls: Sequence[Call]) -> Timing:
    begin = time.perf_counter()
    calls[0]()
    return Timing(1e3 * (time.perf_counter() - begin), 0.0)


def wake_up() -> None:
    """Half a second of matrix products: clocks rise with load."""
    if torch.cuda.is_available():
        a = torch.randn(8192, 8192, device="cuda", dtype=torch.float16)
        for _ in range(400):
            a @ a
        torch.cuda.synchronize()


def kernels_of(call: Call) -> list[tuple[str, float]]:
    """(name, microseconds) of every kernel of one call, in order; none on a CPU."""
    if not torch.cuda.is_available():
        return []
    call()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        call()
        torch.cuda.synchronize()
    events = [e for e in profiler.events() or [] if e.device_type == DeviceType.CUDA]
    events.sort(key=lambda e: e.time_range.start)
    return [(short_name(e.name), round(e.time_range.elapsed_us(), 2)) for e in events]


def main_kernel(kernels: Sequence[tuple[str, float]]) -> str | None:
    """The name of the kernel that took longest."""
    return max(kernels, key=lambda kernel: kernel[1])[0] if kernels else None


def listed(kernels: Sequence[tuple[str, float]]) -> str:
    """The kernels of a call in a table's cell: how often each, and its microseconds together."""
    names = dict.fromkeys(name for name, _ in kernels)
    found = {name: [us for other, us in kernels if other == name] for name in names}
    return "<br>".join(f"{len(us)} x `{name}` {sum(us):.0f} us" for name, us in found.items())


def short_name(name: str) -> str:
    """A demangled kernel name without return type, arguments and most namespaces, on one line."""
    for noise in ("void ", "at::", "native::", "(anonymous namespace)::", "<unnamed>::", "(int)"):
        name = name.replace(noise, "")
    name = name.split("(")[0].strip()
    if name.startswith(("vectorized_elementwise_kernel", "elementwise_kernel")):
        return name.split("<")[0]
    return name if len(name) <= 80 else name[:77] + "..."

"""The spread of a call's times, and the names of the kernels it runs."""

import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch.autograd import DeviceType

from vllm_gac.profiling.timing import MORE_THAN_L2, replay_microseconds, warm_up

Call: TypeAlias = Callable[[], object]

_TRIALS, _TRIAL_MS, _MOST_ROUNDS = 7, 3.0, 40
# Trials are short: after a longer one the GPU meets its power limit, and its clocks then depend on
# the minute before.
METHOD = f"median of {_TRIALS} trials of {_TRIAL_MS:.0f} ms, CUDA graphs"


@dataclass(frozen=True, slots=True)
class Timing:
    """The median of the trials in milliseconds, and their range as a share of it."""

    ms: float
    spread: float


def copies_past_l2(nbytes: int) -> int:
    """How many inputs of `nbytes` to use in turn, so that none is still in the L2."""
    return math.ceil(MORE_THAN_L2 / nbytes) if torch.cuda.is_available() else 1


def timed(calls: Sequence[Call]) -> Timing:
    """Time of one call, where `calls` do the same with inputs of their own.

    A CUDA graph runs them in turn: no launch gaps, and no input is still in the L2.
    """
    if not torch.cuda.is_available():
        return _timed_on_cpu(calls)

    def all_in_turn() -> None:
        for call in calls:
            call()

    once = replay_microseconds(all_in_turn, calls=1, replays=1)[0] / 1e3
    rounds = max(1, min(_MOST_ROUNDS, round(_TRIAL_MS / max(once, 1e-3))))
    trials = [us / 1e3 / len(calls) for us in replay_microseconds(all_in_turn, rounds, _TRIALS)]
    torch.cuda.empty_cache()  # a graph's memory is its own until then
    middle = statistics.median(trials)
    return Timing(middle, (max(trials) - min(trials)) / middle)


def apart(spreads: Iterable[float]) -> str:
    """A sentence on the spread of the trials of many points."""
    found = sorted(spreads)
    middle = statistics.median(found)
    return f"Trials of a point are {middle:.1%} apart in the median, {found[-1]:.1%} at most."


def _timed_on_cpu(calls: Sequence[Call]) -> Timing:
    begin = time.perf_counter()
    calls[0]()
    return Timing(1e3 * (time.perf_counter() - begin), 0.0)


def wake_up() -> None:
    """Raise the clocks of the GPU, if there is one."""
    if torch.cuda.is_available():
        warm_up()


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
    """The kernels of a call for a table's cell: how often each runs, and its total microseconds."""
    names = dict.fromkeys(name for name, _ in kernels)
    found = {name: [us for other, us in kernels if other == name] for name in names}
    return "<br>".join(f"{len(us)} x `{name}` {sum(us):.0f} us" for name, us in found.items())


def short_name(name: str) -> str:
    """A demangled kernel name on one line, without return type, arguments and most namespaces."""
    for noise in ("void ", "at::", "native::", "(anonymous namespace)::", "<unnamed>::", "(int)"):
        name = name.replace(noise, "")
    name = name.split("(")[0].strip()
    if name.startswith(("vectorized_elementwise_kernel", "elementwise_kernel")):
        return name.split("<")[0]
    return name if len(name) <= 80 else name[:77] + "..."

"""Times of kernels that wait for weights, by a law that is fitted to measurements.

A launch takes an overhead, and the roofline's time of what it computes, times a slowdown. Both are
fitted at each number of tokens.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vllm_gac.gpu.latency.interpolation import interpolate

# Of two columns of the fit: the squared sine of the angle below which they tell the same.
_PARALLEL = 0.01


@dataclass(frozen=True, slots=True)
class MeasuredLaunches:
    """Launches of a kernel in one measurement: how many, and their times together.

    All but `launches` are in microseconds: the roofline's time, the one that was measured, and the
    one of the whole measurement, other kernels included.
    """

    launches: int
    roofline: float
    time: float
    whole: float


class LaunchTimes:
    """The law of one kernel on one GPU, by what was measured at each number of tokens."""

    def __init__(self, measured: Mapping[int, Sequence[MeasuredLaunches]]) -> None:
        self.log_tokens = [math.log(tokens) for tokens in sorted(measured)]
        self.overheads: list[float] = []
        self.slowdowns: list[float] = []
        overhead = 0.0
        for tokens in sorted(measured):
            overhead, slowdown = _fit(measured[tokens], overhead)
            self.overheads.append(overhead)
            self.slowdowns.append(slowdown)

    def __bool__(self) -> bool:
        """Whether anything was measured."""
        return bool(self.log_tokens)

    def microseconds(self, tokens: int, roofline: float) -> float:
        """Time of a launch for which the roofline allows `roofline` microseconds.

        Between measured numbers of tokens, overhead and slowdown are interpolated over logs.
        """
        overhead, slowdown = (
            interpolate(self.log_tokens, values, math.log(tokens))
            for values in (self.overheads, self.slowdowns)
        )
        return overhead + slowdown * roofline


def _fit(measured: Sequence[MeasuredLaunches], known: float) -> tuple[float, float]:
    """The overhead of a launch and its slowdown, by least squares of relative errors.

    If `measured` does not tell them apart, or one would be negative, the overhead is `known`, and
    no launch is faster than the roofline.
    """
    rows = [(m.launches / m.whole, m.roofline / m.whole, m.time / m.whole) for m in measured]
    aa, bb = sum(a * a for a, _, _ in rows), sum(b * b for _, b, _ in rows)
    ab = sum(a * b for a, b, _ in rows)
    ay, by = sum(a * y for a, _, y in rows), sum(b * y for _, b, y in rows)
    if (determinant := aa * bb - ab * ab) > _PARALLEL * aa * bb:
        overhead = (ay * bb - by * ab) / determinant
        slowdown = (by * aa - ay * ab) / determinant
        if min(overhead, slowdown) >= 0:
            return overhead, slowdown
    return known, max(1.0, (by - known * ab) / bb)

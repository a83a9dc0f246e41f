"""Two servers whose true ratio is known, drawn by numpy: starts differ, and stalls are rare.

    python -m tests.loadtest.drawn_samples [EXPERIMENTS]

prints how many intervals hold the truth, and how many tell the servers apart.
"""

import sys
from dataclasses import dataclass
from itertools import product

import numpy as np

from loadtest.report.intervals import Floats, Ints, Samples, ratio

_BLOCKS, _REQUESTS = 12, 60  # of a start, of a block


@dataclass(frozen=True)
class Drawn:
    """Latencies of both servers, in seconds, each with its block's number."""

    base: Samples
    other: Samples
    starts: Ints  # [blocks]


def drawn(seed: int, starts: int, true: float, stalls: float = 0.7, spread: float = 0.01) -> Drawn:
    """Requests of both servers under the same schedules; `other` is `true` times as fast.

    There are `stalls` of a second or so in a start, on average, of some ten requests each. Starts
    differ by a standard deviation of `spread`, as a fraction.
    """
    rng = np.random.default_rng(seed)
    numbers = np.repeat(np.arange(starts * _BLOCKS), _REQUESTS)
    shared = rng.normal(0, 0.3, len(numbers)) + rng.normal(0, 0.1, starts * _BLOCKS)[numbers]

    def server() -> Floats:
        noise = rng.normal(0, spread, starts)[numbers // _BLOCKS] + rng.normal(
            0, 0.05, len(numbers)
        )
        seconds = 0.2 * np.exp(shared + noise)
        for first in rng.integers(0, len(seconds), rng.poisson(stalls * starts)):
            seconds[first : first + 10] += rng.exponential(1.0)
        return np.asarray(seconds)

    base, other = server(), server() / true
    of_starts = np.repeat(np.arange(starts), _BLOCKS)
    return Drawn(Samples(base, numbers), Samples(other, numbers), of_starts)


def shares(
    starts: int, percent: float, true: float, stalls: float, spread: float, experiments: int
) -> tuple[int, int]:
    """How many intervals hold the truth, and how many tell the servers apart."""
    ratios = []
    for seed in range(experiments):
        servers = drawn(seed, starts, true, stalls, spread)
        units = servers.starts if starts > 1 else np.arange(len(servers.starts))
        both = servers.base, servers.other
        ratios.append(ratio(*both, percent, (units, units), paired=True, by_start=starts > 1))
    held = sum(e.low <= true <= e.high for e in ratios)
    return held, sum(e.low > 1 or e.high < 1 for e in ratios)


def table(experiments: int) -> str:
    """What `shares` finds, in percent, as Markdown."""
    lines = ["| stalls a start | starts | percentile | as fast | hold | tell apart |"]
    lines += ["| --- " * 6 + "|"]
    for stalls, starts, percent, true in product((0, 0.2, 0.7), (2, 3), (50, 99), (1, 1.03, 1.2)):
        found = shares(starts, percent, true, stalls, 0.01, experiments)
        said = " | ".join(f"{count / experiments:.1%}" for count in found)
        lines.append(f"| {stalls} | {starts} | p{percent} | {true} | {said} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(int(sys.argv[1]) if len(sys.argv) > 1 else 400))

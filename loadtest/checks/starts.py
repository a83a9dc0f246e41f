"""How often intervals hold the truth if starts of one server differ, by simulation.

Two servers are the same: each start of one is faster or slower by chance, by the spread that is
planted, and so is each request. So a speedup that is told apart is told wrongly.
"""

from collections.abc import Sequence

import numpy as np

from loadtest.report.intervals import Ints, Samples, percentile, ratio

NAME = "starts differ"
SPREADS = (0.0, 0.005, 0.01, 0.02)
STARTS = (3, 5, 10)
_BLOCKS, _REQUESTS = 4, 50  # of a start, of a block
_NOISE = 0.02  # of a request


def starts_section(experiments: int = 100) -> list[str]:
    """The lines of a page that say what intervals hold."""
    lines = [
        "",
        "## Starts that differ",
        "",
        f'`python -m loadtest faults OUT --only "{NAME}"`: {experiments} simulated comparisons a '
        "cell of two equal servers, each",
        f"started as often as the column says, {_BLOCKS} blocks of {_REQUESTS} requests a start. A "
        "cell is how often 95 % intervals hold the",
        "truth, of p50 / of its speedup, and the half width of the speedup's. *blocks alone* is "
        "what intervals would hold that",
        "did not know of starts.",
        "",
        "| spread between starts | "
        + " | ".join([*(f"{starts} starts" for starts in STARTS), "blocks alone, 3 starts"])
        + " |",
        "| ---: |" + " ---: |" * (len(STARTS) + 1),
    ]
    for spread in SPREADS:
        cells = [_cell(spread, starts, experiments, True) for starts in STARTS]
        cells.append(_cell(spread, STARTS[0], experiments, False))
        lines.append(f"| {spread:.1%} | " + " | ".join(cells) + " |")
    return lines


def _cell(spread: float, starts: int, experiments: int, known: bool) -> str:
    own, speedup, width = held(spread, starts, range(experiments), known)
    return f"{own:.0%} / {speedup:.0%}, ±{width:.1%}"


def held(
    spread: float, starts: int, seeds: Sequence[int], known: bool
) -> tuple[float, float, float]:
    """How often the intervals of p50 and of its speedup hold 1, and the speedup's half width.

    Args:
        spread: the standard deviation between starts, as a fraction.
        starts: of each server.
        seeds: one for each experiment.
        known: whether the intervals know which block is of which start.
    """
    own, speedups, widths = [], [], []
    blocks = starts * _BLOCKS
    of_start: Ints = np.repeat(np.arange(starts), _BLOCKS)
    numbers = np.repeat(np.arange(blocks), _REQUESTS)
    for seed in seeds:
        random = np.random.default_rng(seed)
        one, two = (
            Samples(
                np.exp(
                    random.normal(0, spread, starts)[of_start][numbers]
                    + random.normal(0, _NOISE, len(numbers))
                ),
                numbers,
            )
            for _ in range(2)
        )
        found = percentile(one, 50.0, blocks, of_start if known else None)
        both = (of_start, of_start) if known else None
        versus = ratio(one, two, 50.0, (blocks, blocks), paired=True, starts=both)
        own.append(found.low <= 1 <= found.high)
        speedups.append(versus.low <= 1 <= versus.high)
        widths.append(versus.relative)
    return float(np.mean(own)), float(np.mean(speedups)), float(np.median(widths))

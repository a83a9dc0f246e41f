"""How narrow the limits of a capacity get, by simulated searches of servers that saturate."""

import math

import numpy as np

from loadtest.report.capacity import AtRate, capacity
from loadtest.report.intervals import Samples

NAME = "capacity searched"
CAPACITIES = (1.0, 3.0, 7.0, 15.0)  # requests per second
STEPS = (8, 16)
_SECONDS, _BLOCK = 60.0, 20.0
_STEEP = 40  # 1 % of the requests are bad at the capacity, and 45 % at 1.1 times


def searches_section(experiments: int = 20) -> list[str]:
    """The lines of a page that say how narrow the limits get."""
    lines = [
        "",
        "## Searches for a capacity",
        "",
        f'`python -m loadtest faults OUT --only "{NAME}"`: {experiments} simulated searches a '
        "cell, from 0.6 and 1.7 times the capacity, steps",
        f"of {_SECONDS:g} s; 1 % of the requests are bad at the capacity, and 45 % at 1.1 times. A "
        "cell is how often the limits hold the capacity,",
        "and how far they are from their middle (∞: one is missing), at the median.",
        "",
        "| capacity, 1/s | " + " | ".join(f"{steps} steps" for steps in STEPS) + " |",
        "| ---: |" + " ---: |" * len(STEPS),
    ]
    for true in CAPACITIES:
        cells = []
        for steps in STEPS:
            found = [searched(true, steps, seed) for seed in range(experiments)]
            held = np.mean([low <= true <= high for low, high in found])
            widths = [math.sqrt(high / low) - 1 if low else math.inf for low, high in found]
            width = float(np.median(widths))
            cells.append(f"{held:.0%}, ±{width:.0%}" if width < math.inf else f"{held:.0%}, ∞")
        lines.append(f"| {true:g} | " + " | ".join(cells) + " |")
    return lines


def searched(true: float, steps: int, seed: int) -> tuple[float, float]:
    """The limits after a search of `steps` steps for the capacity `true`."""
    random = np.random.default_rng(seed)
    rows = [_tested(random, start * true, true) for start in (0.6, 1.7)]
    for _ in range(steps):
        rows.append(_tested(random, capacity("", "", rows).next_rate, true))
    found = capacity("", "", rows).rate
    return found.low, found.high


def _tested(random: np.random.Generator, rate: float, true: float) -> AtRate:
    count = max(int(random.poisson(rate * _SECONDS)), 1)
    bad = min(0.01 * (rate / true) ** _STEEP, 1.0)
    blocks = round(_SECONDS / _BLOCK)
    numbers = np.sort(random.integers(0, blocks, count))
    kept = (random.random(count) >= bad).astype(np.float64)
    return AtRate(rate, Samples(kept, numbers), blocks, _SECONDS)

"""The conclusion of a report, in sentences that a person can decide by."""

import math
from collections.abc import Sequence

from loadtest.report.capacity import GOOD_ENOUGH, Capacity
from loadtest.report.comparison import Comparison
from loadtest.report.intervals import limits_of_ratio
from loadtest.report.summary import PooledRuns, Summary


def conclusion(
    groups: Sequence[PooledRuns],
    summaries: Sequence[Summary],
    comparisons: Sequence[Comparison],
    capacities: Sequence[Capacity],
) -> str:
    """One sentence on each kind of traffic, and one on what got worse."""
    sentences = []
    for traffic in dict.fromkeys(group.traffic for group in groups):
        mine = [c for c in capacities if c.traffic == traffic]
        pairs = [(g, s) for g, s in zip(groups, summaries, strict=True) if g.traffic == traffic]
        versus = [c for c in comparisons if c.traffic == traffic]
        sentences.append(f"{traffic}: {_capacity(mine, pairs, versus)}{_worse(versus)}.")
    return " ".join(sentences)


def _capacity(
    capacities: Sequence[Capacity],
    pairs: Sequence[tuple[PooledRuns, Summary]],
    comparisons: Sequence[Comparison],
) -> str:
    """What each server takes; where no tested rate tells, what it did at the highest one."""
    if any(c.rate.low > 0 or math.isfinite(c.rate.high) for c in capacities):
        baseline = comparisons[0].baseline if comparisons else None
        base = next((c for c in capacities if c.label == baseline), None)
        said = [_of_one(c, base) for c in capacities]
        return f"with {GOOD_ENOUGH:.0%} of the requests within the SLO, {', '.join(said)}"
    highest = max(group.rate for group, _ in pairs)
    said = [f"{s.good_fraction.value:.1%} of {g.label}" for g, s in pairs if g.rate == highest]
    return (
        f"at {highest:g}/s, the share of requests within the SLO is {', '.join(said)}; there are "
        "too few requests to tell a capacity"
    )


def _of_one(capacity: Capacity, base: Capacity | None) -> str:
    low, high = capacity.rate.low, capacity.rate.high
    if low == 0:
        limits = f"less than {high:.3g}/s" if math.isfinite(high) else "a rate that is not known"
    elif math.isinf(high):
        limits = f"more than {low:.3g}/s"
    else:
        limits = f"{low:.3g} to {high:.3g}/s"
    text = f"{capacity.label} takes {limits}"
    if base is None or base is capacity:
        return text
    gain = limits_of_ratio(capacity.rate, base.rate)
    if gain.low > 1:
        return f"{text} (at least {gain.low:.2f}x {base.label})"
    if gain.high < 1:
        return f"{text} (at most {gain.high:.2f}x {base.label})"
    return f"{text} (not told apart from {base.label})"


def _worse(comparisons: Sequence[Comparison]) -> str:
    """What is surely slower than the baseline at the median."""
    names = {"ttft": "to the first token", "tpot": "per token after it"}
    slower = [
        f"{c.label} {names[measure]} at {c.rate:g}/s ({e.value:.2f}x)"
        for c in comparisons
        for measure in names
        if (e := c.speedup[measure][50.0]).high < 1
    ]
    return f"; slower than {comparisons[0].baseline}: {', '.join(slower)}" if slower else ""

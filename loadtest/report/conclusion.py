"""The conclusion of a report: what is surely better or worse, in a paragraph to decide by."""

import math
from collections.abc import Iterator, Sequence

from loadtest.report.capacity import GOOD_ENOUGH, Capacity
from loadtest.report.comparison import ENOUGH_STARTS, Comparison
from loadtest.report.intervals import Estimate, limits_of_ratio
from loadtest.report.summary import PooledRuns, Summary

_NAMES = {"ttft": "time to first token", "tpot": "time per token", "e2e": "whole answer"}


def conclusion(
    groups: Sequence[PooledRuns],
    summaries: Sequence[Summary],
    comparisons: Sequence[Comparison],
    capacities: Sequence[Capacity],
) -> str:
    """On each kind of traffic: what is told apart, what failed, and who takes how much."""
    return " ".join(
        f"{traffic}: {'; '.join(_sentences(traffic, groups, summaries, comparisons, capacities))}."
        for traffic in dict.fromkeys(group.traffic for group in groups)
    )


def _sentences(
    traffic: str,
    groups: Sequence[PooledRuns],
    summaries: Sequence[Summary],
    comparisons: Sequence[Comparison],
    capacities: Sequence[Capacity],
) -> Iterator[str]:
    versus = [c for c in comparisons if c.traffic == traffic]
    for label in dict.fromkeys(c.label for c in versus):
        yield _against([c for c in versus if c.label == label])
    pairs = [(g, s) for g, s in zip(groups, summaries, strict=True) if g.traffic == traffic]
    failed = failures(*zip(*pairs, strict=True))
    yield f"failed requests: {', '.join(failed)}" if failed else "no request failed"
    yield _capacity([c for c in capacities if c.traffic == traffic], pairs, versus)


def _against(comparisons: Sequence[Comparison]) -> str:
    """What one server surely does better and worse than the baseline."""
    who = f"{comparisons[0].label} against {comparisons[0].baseline}"
    least = ENOUGH_STARTS
    if why := _too_few_starts(min(c.starts for c in comparisons)):
        # Who cannot restart a server still asks how it is as it runs.
        who += f": nothing is told apart, because {why}. Of these starts alone"
        least = 1
    better, bad, unsure = _told_apart(comparisons, least)
    named = {"surely better": better, "surely worse": bad, "not told apart": unsure}
    return f"{who}, " + "; ".join(
        f"{name}: {', '.join(said)}" for name, said in named.items() if said
    )


def worse(comparisons: Sequence[Comparison]) -> list[str]:
    """What one server surely does worse than the baseline, or why nobody can tell.

    `comparisons` are those under one kind of traffic. A rate that was measured too seldom, such as
    one of a search, does not count beside one that was measured often enough.
    """
    if not comparisons:
        return ["cannot be told, because the baseline has no runs at the same rates"]
    if why := _too_few_starts(max(c.starts for c in comparisons)):
        return [f"cannot be told, because {why}"]
    return _told_apart(comparisons)[1]


def _too_few_starts(starts: int) -> str:
    """Why so few starts tell nothing; "" if they are enough."""
    if starts >= ENOUGH_STARTS:
        return ""
    return (
        "starts of one server differ and there "
        f"{'are only two starts' if starts == 2 else 'is only one start'} of each; measure "
        f"{ENOUGH_STARTS} or more"
    )


def _told_apart(
    comparisons: Sequence[Comparison], least: int = ENOUGH_STARTS
) -> tuple[list[str], list[str], list[str]]:
    """What one server surely does better than the baseline, what worse, and what neither.

    Comparisons of fewer than `least` starts do not count.
    """
    better: list[str] = []
    worse: list[str] = []
    unsure = []
    enough = [c for c in comparisons if c.starts >= least]
    for name, ratios in _ratios(enough).items():
        for verdict, said in (("better", better), ("worse", worse)):
            if sure := {at: e for at, e in ratios.items() if judged(e) == verdict}:
                said.append(f"{name} {_at_rates(sure)}")
        if not any(map(judged, ratios.values())):
            unsure.append(name)
    return better, worse, unsure


def failures(groups: Sequence[PooledRuns], summaries: Sequence[Summary]) -> list[str]:
    """How many requests of each server failed at each rate, where any did."""
    return [
        f"{summary.failed:,} of {summary.requests:,} of {group.label} at {group.rate:g}/s"
        for group, summary in zip(groups, summaries, strict=True)
        if summary.failed
    ]


def told(comparison: Comparison, estimate: Estimate) -> str:
    """What the page calls a ratio of a comparison: as `judged`, but "" with too few starts."""
    return judged(estimate) if comparison.starts >= ENOUGH_STARTS else ""


def judged(estimate: Estimate) -> str:
    """Whether a ratio, of which more is better, is surely "better" or "worse"; "" if neither."""
    return "better" if estimate.low > 1 else "worse" if estimate.high < 1 else ""


def _ratios(comparisons: Sequence[Comparison]) -> dict[str, dict[float, Estimate]]:
    """By what is compared and by rate. More than 1 is better."""
    found: dict[str, dict[float, Estimate]] = {}
    for c in comparisons:
        for measure, name in _NAMES.items():
            for percent in (50.0, 99.0):
                named = found.setdefault(f"{name} p{percent:g}", {})
                named[c.rate] = c.speedup[measure][percent]
        found.setdefault("goodput", {})[c.rate] = c.goodput
        found.setdefault("answered requests", {})[c.rate] = c.answered
        if not math.isnan(c.energy.value):
            found.setdefault("energy per good token", {})[c.rate] = c.energy
    return found


def _at_rates(sure: dict[float, Estimate]) -> str:
    """ "1.25x (1.24 to 1.26) at 8/s", or of several rates "1.11x to 1.30x at 2, 24/s"."""
    rates = ", ".join(f"{rate:g}" for rate in sure)
    if len(sure) == 1:
        (e,) = sure.values()
        high = f"to {e.high:.2f}" if math.isfinite(e.high) else "or more"
        return f"{_times(e.value)} ({e.low:.2f} {high}) at {rates}/s"
    values = [e.value for e in sure.values()]
    return f"{_times(min(values))} to {_times(max(values))} at {rates}/s"


def _times(value: float) -> str:
    return f"{value:.2f}x" if math.isfinite(value) else "∞"


def _capacity(
    capacities: Sequence[Capacity],
    pairs: Sequence[tuple[PooledRuns, Summary]],
    comparisons: Sequence[Comparison],
) -> str:
    """What each server takes; where no tested rate tells, what it did at the highest one."""
    if any(c.rate.low > 0 or math.isfinite(c.rate.high) for c in capacities):
        baseline = comparisons[0].baseline if comparisons else None
        base = next((c for c in capacities if c.label == baseline), None)
        enough = {c.label for c in comparisons if c.starts >= ENOUGH_STARTS}
        said = [_of_one(c, base if c.label in enough else None) for c in capacities]
        return f"with {GOOD_ENOUGH:.0%} of the requests within the SLO, {', '.join(said)}"
    highest = max(group.rate for group, _ in pairs)
    said = [f"{s.good_fraction.value:.1%} of {g.label}" for g, s in pairs if g.rate == highest]
    return (
        f"at {highest:g}/s, the share of requests within the SLO is {', '.join(said)}; there are "
        "too few requests to tell a capacity"
    )


def _of_one(capacity: Capacity, base: Capacity | None) -> str:
    low, high = capacity.rate.low, capacity.rate.high
    if low == 0 and math.isinf(high):
        return f"of {capacity.label} too few requests tell"
    if low == 0:
        limits = f"less than {high:.3g}/s"
    elif math.isinf(high):
        limits = f"more than {low:.3g}/s"
    else:
        limits = f"{low:.3g} to {high:.3g}/s"
    text = f"{capacity.label} takes {limits}"
    if base is None:
        return text
    gain = limits_of_ratio(capacity.rate, base.rate)
    if gain.low > 1:
        return f"{text} (at least {gain.low:.2f}x {base.label})"
    return f"{text} (at most {gain.high:.2f}x {base.label})" if gain.high < 1 else text

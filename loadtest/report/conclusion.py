"""The conclusion of a report, a line for each server under each kind of traffic, to decide by."""

import math
from collections.abc import Sequence

from loadtest.report.capacity import GOOD_ENOUGH, Capacity
from loadtest.report.comparison import ENOUGH_STARTS, Comparison
from loadtest.report.intervals import Estimate
from loadtest.report.summary import PooledRuns, Summary

_NAMES = {"ttft": "time to first token", "tpot": "time per token", "e2e": "whole answer"}


def conclusion(
    groups: Sequence[PooledRuns],
    summaries: Sequence[Summary],
    comparisons: Sequence[Comparison],
    capacities: Sequence[Capacity],
) -> list[str]:
    """On each kind of traffic: what is told apart, what failed, and who takes how much."""
    lines = []
    for traffic in dict.fromkeys(group.traffic for group in groups):
        versus = [c for c in comparisons if c.traffic == traffic]
        for label in dict.fromkeys(c.label for c in versus):
            headline = _headline([c for c in versus if c.label == label])
            lines.append(f"{traffic}: {headline}")
        pairs = [(g, s) for g, s in zip(groups, summaries, strict=True) if g.traffic == traffic]
        failed = failures(*zip(*pairs, strict=True))
        takes = _capacity([c for c in capacities if c.traffic == traffic], pairs, versus)
        said = f"failed requests: {', '.join(failed)}" if failed else "no request failed"
        lines.append(f"{traffic}: {said}; {takes}")
    return lines


def _headline(comparisons: Sequence[Comparison]) -> str:
    """What one server does better and worse than the baseline, in some twenty words."""
    first, starts = comparisons[0], min(c.starts for c in comparisons)
    by_name = ratios(comparisons)
    speeds = by_name.pop("time per token p50")
    text = f"{first.label} is {_speed(speeds, first.baseline)}"
    if other := [c for c in comparisons if not c.same_length]:
        lengths = ", ".join(f"{_length(c)} at {c.rate:g}/s" for c in other)
        text = f"answers have another length ({lengths}), compared by time per token alone: {text}"
    is_worse = any(judged(e) == "worse" for e in speeds.values())
    is_told = not any(lacks_limits(e) for e in speeds.values()) and not any(
        math.isnan(e.value) or (lacks_limits(e) and not name.endswith("p99"))
        for name, by_rate in by_name.items()
        for e in by_rate.values()
    )
    nothing = "nothing else worse" if is_worse else "nothing worse"
    for verdict, none in (("better", ""), ("worse", nothing if is_told else "")):
        said = [
            f"{name} {_at_rates(sure)}"
            for name, by_rate in by_name.items()
            if (sure := {rate: e for rate, e in by_rate.items() if judged(e) == verdict})
        ]
        if said or none:
            text += f"; {verdict}: {', '.join(said)}" if said else f"; {none}"
    text += f"; {starts} start{'s' if starts > 1 else ''}"
    return text if starts >= ENOUGH_STARTS else f"{text}: of no others is this told"


def _length(comparison: Comparison) -> str:
    return "unknown" if math.isnan(comparison.length) else f"{comparison.length:.2f}x"


def _speed(speeds: dict[float, Estimate], baseline: str) -> str:
    """ "25 % faster (23 to 27 %) at 8/s per token than dense"."""
    said = []
    for verdict, word in (("better", "faster"), ("worse", "slower")):
        if sure := {rate: e for rate, e in speeds.items() if judged(e) == verdict}:
            slower = verdict == "worse"
            text = f"{_percents([e.value for e in sure.values()], slower)} % {word}"
            if len(sure) == 1:
                (e,) = sure.values()
                text += f" ({_percents([e.low, e.high], slower)} %)"
            said.append(f"{text} at {_rates(sure)}")
    if said:
        return f"{' and '.join(said)} per token than {baseline}"
    if all(math.isnan(e.value) for e in speeds.values()):
        return f"not compared with {baseline} in time per token, which nobody knows"
    return f"not told apart from {baseline} in time per token at {_rates(speeds)}"


def _percents(ratios: Sequence[float], slower: bool) -> str:
    """ "23 to 27": by how many percent one is faster, or slower, by ratios above or below 1."""
    times = ((1 / r if r > 0 else math.inf) if slower else r for r in ratios)
    changes = sorted(100 * (r - 1) for r in times)
    said = [f"{c:.0f}" if 10 <= c < math.inf else f"{c:.1f}" if c < 10 else "∞" for c in changes]
    return " to ".join(dict.fromkeys((said[0], said[-1])))


def _rates(named: dict[float, Estimate]) -> str:
    return f"{', '.join(f'{rate:g}' for rate in named)}/s"


def failures(groups: Sequence[PooledRuns], summaries: Sequence[Summary]) -> list[str]:
    """How many requests of each server failed at each rate, where any did."""
    return [
        f"{summary.failed:,} of {summary.requests:,} of {group.label} at {group.rate:g}/s"
        for group, summary in zip(groups, summaries, strict=True)
        if summary.failed
    ]


def judged(estimate: Estimate) -> str:
    """Whether a ratio, of which more is better, is surely "better" or "worse"; "" if neither."""
    return "better" if estimate.low > 1 else "worse" if estimate.high < 1 else ""


def lacks_limits(estimate: Estimate) -> bool:
    """Whether the data says nothing at all of a ratio.

    A ratio of 99th percentiles has no limits wherever a few requests fail in some starts and not in
    all.
    """
    return estimate.low == 0 and math.isinf(estimate.high)


def ratios(comparisons: Sequence[Comparison]) -> dict[str, dict[float, Estimate]]:
    """By what is compared and by rate. More than 1 is better.

    Where answers have another length, only their time per token is compared: who says less is done
    early, and leaves room for the next.
    """
    by_name: dict[str, dict[float, Estimate]] = {}
    for c in comparisons:
        for measure, name in _NAMES.items():
            for percent in (50.0, 99.0):
                if c.same_length or measure == "tpot":
                    named = by_name.setdefault(f"{name} p{percent:g}", {})
                    named[c.rate] = c.speedup[measure][percent]
        by_name.setdefault("answered requests", {})[c.rate] = c.answered
        if c.same_length:
            by_name.setdefault("goodput", {})[c.rate] = c.goodput
    return by_name


def _at_rates(sure: dict[float, Estimate]) -> str:
    """ "1.25x at 8/s", or of several rates "1.11x to 1.30x at 2, 24/s"."""
    values = sorted(e.value for e in sure.values())
    ends = (f"{v:.2f}x" if math.isfinite(v) else "∞" for v in (values[0], values[-1]))
    return f"{' to '.join(dict.fromkeys(ends))} at {_rates(sure)}"


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
    return f"within the SLO at {highest:g}/s: {', '.join(said)}"


def limits(capacity: Capacity) -> str:
    """How many requests per second a server takes, in words."""
    low, high = capacity.rate.low, capacity.rate.high
    if low == 0:
        return "what too few requests tell" if math.isinf(high) else f"less than {high:.3g}/s"
    return f"more than {low:.3g}/s" if math.isinf(high) else f"{low:.3g} to {high:.3g}/s"


def _of_one(capacity: Capacity, base: Capacity | None) -> str:
    text = f"{capacity.label} takes {limits(capacity)}"
    if base is None:
        return text
    low = capacity.rate.low / base.rate.high
    high = capacity.rate.high / base.rate.low if base.rate.low > 0 else math.inf
    if low > 1:
        return f"{text} (at least {low:.2f}x {base.label})"
    return f"{text} (at most {high:.2f}x {base.label})" if high < 1 else text

"""One server against another under the same schedules: speedups, and what else differs."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from loadtest.errors import LoadTestError
from loadtest.report.intervals import Estimate, Ints, ratio, ratio_of_totals
from loadtest.report.summary import MEASURES, PERCENTS, PooledRuns, amounts

# Starts of one server differ by more than its runs do: two tell nothing of how much.
ENOUGH_STARTS = 3
_SAME_LENGTH = 0.01


@dataclass(frozen=True, slots=True)
class Comparison:
    """`label` against `baseline` at `rate`. A ratio above 1 means that `label` is better.

    Attributes:
        speedup: of latencies, by measure and percentile.
        goodput: of requests per second that kept the SLO.
        answered: of the share of requests that did not fail.
        length: how many tokens an answer of `label` has for each one of the baseline's; NaN if
            nobody knows.
        paired: how many repeats had the same schedule. 0: the servers had different ones, and what
            their traffic differs in by chance is in the intervals.
        left_out: how many runs have no partner under the same schedule.
        starts: how often the server was started that was started less often.
    """

    label: str
    baseline: str
    traffic: str
    rate: float
    speedup: dict[str, dict[float, Estimate]]
    goodput: Estimate
    answered: Estimate
    length: float
    paired: int
    left_out: int
    starts: int

    @property
    def same_length(self) -> bool:
        """Whether both surely answered as much: a model that stops early is done early."""
        return abs(self.length - 1) <= _SAME_LENGTH


def compare(groups: Sequence[PooledRuns], baseline: str) -> list[Comparison]:
    """Every group against the baseline's group of the same traffic and rate."""
    base = {(group.traffic, group.rate): group for group in groups if group.label == baseline}
    if not base:
        labels = sorted({group.label for group in groups})
        raise LoadTestError(f"no runs of baseline {baseline!r}; there are {', '.join(labels)}")
    return [
        _compare(base[group.traffic, group.rate], group)
        for group in groups
        if group.label != baseline and (group.traffic, group.rate) in base
    ]


def _compare(base: PooledRuns, other: PooledRuns) -> Comparison:
    pairs = _pairs(base, other)
    kept = [sorted({pair[side] for pair in pairs}) for side in (0, 1)]
    if not pairs:
        kept = [list(range(len(group.runs))) for group in (base, other)]
    starts = min(
        len({group.start_of(number) for number in numbers})
        for group, numbers in zip((base, other), kept, strict=True)
    )
    units, paired, by_start = _units(base, other, pairs, starts), bool(pairs), starts > 1

    def speedup(measure: str, percent: float) -> Estimate:
        samples = base.samples[measure], other.samples[measure]
        return ratio(*samples, percent, units, paired, by_start)

    one, two = amounts(base), amounts(other)

    def gain(name: str, per: str) -> Estimate:
        """The amount of `name` for each of `per`, of `other` over the baseline's."""
        mine, theirs = (two[name], two[per]), (one[name], one[per])
        return ratio_of_totals(mine, theirs, units[::-1], paired)

    return Comparison(
        label=other.label,
        baseline=base.label,
        traffic=other.traffic,
        rate=other.rate,
        speedup={m: {p: speedup(m, p) for p in PERCENTS} for m in MEASURES},
        goodput=gain("good", "seconds"),
        answered=gain("answered", "due"),
        length=other.answered_length / base.answered_length,
        paired=len(pairs),
        left_out=len(base.runs) + len(other.runs) - sum(map(len, kept)),
        starts=starts,
    )


def _pairs(base: PooledRuns, other: PooledRuns) -> list[tuple[int, int]]:
    """The numbers of the repeats of both that had the same schedule, each in one pair.

    Several repeats of one schedule are paired in their order. What has no partner, such as where
    the other's run is INVALID, is left out.
    """
    free: dict[tuple[str, float], list[int]] = {}
    for number in range(len(base.runs)):
        free.setdefault(base.traffic_of(number), []).append(number)
    pairs = []
    for number in range(len(other.runs)):
        if mine := free.get(other.traffic_of(number)):
            pairs.append((mine.pop(0), number))
    return pairs


def _units(
    base: PooledRuns, other: PooledRuns, pairs: Sequence[tuple[int, int]], starts: int
) -> tuple[Ints, Ints]:
    """[blocks] of both: the unit of chance that each block is of, -1 if it is of none.

    That is the start of the server, or the block if one server has only one start.
    """
    if not pairs:
        one, two = (
            group.block_starts if starts > 1 else np.arange(group.blocks) for group in (base, other)
        )
        return one, two
    one, two = (np.full(group.blocks, -1) for group in (base, other))
    one_starts, other_starts = (
        {group.start_of(pair[side]) for pair in pairs} for side, group in enumerate((base, other))
    )
    fewer = int(len(one_starts) > len(other_starts))
    names: dict[object, int] = {}
    for pair in pairs:
        mine, theirs = base.run_blocks[pair[0]], other.run_blocks[pair[1]]
        start = (base, other)[fewer].start_of(pair[fewer])
        many = mine.count == theirs.count and starts == 1
        for number in range(max(mine.count, theirs.count)):
            own = start if starts > 1 else (pair, number if many else 0)
            unit = names.setdefault(own, len(names))
            for units, run in ((one, mine), (two, theirs)):
                if number < run.count:
                    units[run.first + number] = unit
    return one, two

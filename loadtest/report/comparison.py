"""One server against another under the same schedules: speedups, and the part of the ideal reached.

realized fraction = (measured speedup - 1) / (ideal speedup - 1): 1 is all that the smaller model
promises, 0 is no speedup, and below 0 the smaller model is slower. Prefill is judged by the median
TTFT, decode by the median TPOT.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from loadtest.errors import LoadTestError
from loadtest.report.intervals import Estimate, Ints, Samples, ratio, ratio_of_totals
from loadtest.report.summary import MEASURES, PERCENTS, PooledRuns, amounts

PHASES = {"prefill": "ttft", "decode": "tpot"}
# Starts of one server differ by more than its runs do: two tell nothing of how much.
ENOUGH_STARTS = 3


@dataclass(frozen=True, slots=True)
class Comparison:
    """`label` against `baseline` at `rate`. A ratio above 1 means that `label` is better.

    Attributes:
        speedup: of latencies, by measure and percentile.
        goodput: of requests per second that kept the SLO.
        answered: of the share of requests that did not fail.
        energy: of output tokens within the SLO per joule; NaN if it was not measured.
        ideal, realized: by phase.
        paired: how many repeats had the same schedule. 0: the servers had different ones, and what
            their traffic differs in by chance is in the intervals.
        starts: how often the server was started that was started less often.
    """

    label: str
    baseline: str
    traffic: str
    rate: float
    speedup: dict[str, dict[float, Estimate]]
    goodput: Estimate
    answered: Estimate
    energy: Estimate
    ideal: dict[str, float]
    realized: dict[str, Estimate]
    paired: int
    starts: int


def parse_ideals(texts: Sequence[str]) -> dict[tuple[str, str], float]:
    """["gac:decode=1.33"] -> {("gac", "decode"): 1.33}; LoadTestError for anything else."""
    ideals = {}
    for text in texts:
        left, _, number = text.partition("=")
        label, _, phase = left.rpartition(":")
        try:
            ratio = float(number)
        except ValueError:
            ratio = 0.0
        if not label or phase not in PHASES or not 1.0 < ratio < 1000:
            raise LoadTestError(
                f"--ideal {text!r}: expected LABEL:PHASE=RATIO with PHASE of "
                f"{', '.join(PHASES)} and RATIO above 1, such as gac:decode=1.33"
            )
        ideals[label, phase] = ratio
    return ideals


def compare(
    groups: Sequence[PooledRuns], baseline: str, ideals: Mapping[tuple[str, str], float]
) -> list[Comparison]:
    """Every group against the baseline's group of the same traffic and rate."""
    base = {(group.traffic, group.rate): group for group in groups if group.label == baseline}
    if not base:
        labels = sorted({group.label for group in groups})
        raise LoadTestError(f"no runs of baseline {baseline!r}; there are {', '.join(labels)}")
    unknown = {label for label, _ in ideals} - {group.label for group in groups}
    if unknown:
        raise LoadTestError(f"--ideal names {sorted(unknown)[0]!r}, of which there are no runs")
    return [
        _compare(base[group.traffic, group.rate], group, ideals)
        for group in groups
        if group.label != baseline and (group.traffic, group.rate) in base
    ]


def _compare(
    base: PooledRuns, other: PooledRuns, ideals: Mapping[tuple[str, str], float]
) -> Comparison:
    paired = _paired(base, other)
    # Blocks of the other server in the order of the baseline's.
    order = np.argsort([a for a, _ in sorted(paired, key=lambda pair: pair[1])])
    starts = base.block_starts, other.block_starts
    if paired:
        starts = starts[0], _numbered(starts[1].reshape(len(order), -1)[order].ravel())
    speedup = {
        measure: {p: _speedup(base, other, measure, p, paired, starts) for p in PERCENTS}
        for measure in MEASURES
    }
    ideal = {
        phase: ideals[other.label, phase] for phase in PHASES if (other.label, phase) in ideals
    }
    realized = {}
    for phase, best in ideal.items():
        e = speedup[PHASES[phase]][50.0]
        parts = ((number - 1) / (best - 1) for number in (e.value, e.low, e.high))
        realized[phase] = Estimate(*parts)
    one, two = amounts(base), amounts(other)

    def gain(name: str, per: str) -> Estimate:
        """The amount of `name` for each of `per`, of `other` over the baseline's."""
        mine, my_units = two[name], two[per]
        if paired:
            mine, my_units = (a.reshape(len(order), -1)[order].ravel() for a in (mine, my_units))
        return ratio_of_totals((mine, my_units), (one[name], one[per]), bool(paired), starts)

    return Comparison(
        label=other.label,
        baseline=base.label,
        traffic=other.traffic,
        rate=other.rate,
        speedup=speedup,
        goodput=gain("good", "seconds"),
        answered=gain("answered", "due"),
        energy=gain("good tokens", "joules"),
        ideal=ideal,
        realized=realized,
        paired=len(paired),
        starts=min(base.starts, other.starts),
    )


def _paired(base: PooledRuns, other: PooledRuns) -> list[tuple[int, int]]:
    """The numbers of the repeats of both that had the same schedule."""
    lengths = {round(end - begin, 3) for begin, end in (*base.windows, *other.windows)}
    if len(lengths) > 1 or len(set(base.schedules)) < len(base.schedules):
        return []
    place = {schedule: number for number, schedule in enumerate(base.schedules)}
    pairs = [(place[s], number) for number, s in enumerate(other.schedules) if s in place]
    # A part of the repeats is not a fair picture of either: all or none.
    return pairs if len(pairs) == len(base.runs) == len(other.runs) else []


def _speedup(
    base: PooledRuns,
    other: PooledRuns,
    measure: str,
    percent: float,
    paired: Sequence[tuple[int, int]],
    starts: tuple[Ints, Ints],
) -> Estimate:
    theirs, mine = base.samples[measure], other.samples[measure]
    if paired:
        mine = _renumbered(mine, other.blocks // len(other.runs), {b: a for a, b in paired})
    return ratio(theirs, mine, percent, (base.blocks, other.blocks), bool(paired), starts)


def _numbered(starts: Ints) -> Ints:
    """The same starts, numbered in the order in which they come."""
    seen = list(dict.fromkeys(starts.tolist()))
    return np.array([seen.index(start) for start in starts.tolist()])


def _renumbered(samples: Samples, per_run: int, place: Mapping[int, int]) -> Samples:
    """The samples with each run's blocks where `place` puts the run."""
    runs, inside = np.divmod(samples.blocks, per_run)
    moved = np.array([place[run] for run in range(len(place))])[runs]
    return dataclasses.replace(samples, blocks=moved * per_run + inside)

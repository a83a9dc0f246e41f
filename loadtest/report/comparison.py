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
from loadtest.report.intervals import Estimate, Samples, ratio
from loadtest.report.summary import MEASURES, PERCENTS, PooledRuns

PHASES = {"prefill": "ttft", "decode": "tpot"}


@dataclass(frozen=True, slots=True)
class Comparison:
    """`label` against `baseline` at `rate`; speedup > 1 means that `label` is faster.

    `paired` repeats had the same schedule. 0: the servers had different ones, and what their
    traffic differs in by chance is in the interval.
    """

    label: str
    baseline: str
    traffic: str
    rate: float
    speedup: dict[str, dict[float, Estimate]]
    ideal: dict[str, float]
    realized: dict[str, Estimate]
    paired: int


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
    speedup = {
        measure: {p: _speedup(base, other, measure, p, paired) for p in PERCENTS}
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
    return Comparison(
        other.label, base.label, other.traffic, other.rate, speedup, ideal, realized, len(paired)
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
) -> Estimate:
    theirs, mine = base.samples[measure], other.samples[measure]
    if paired:
        mine = _renumbered(mine, other.blocks // len(other.runs), {b: a for a, b in paired})
    return ratio(theirs, mine, percent, (base.blocks, other.blocks), bool(paired))


def _renumbered(samples: Samples, per_run: int, place: Mapping[int, int]) -> Samples:
    """The samples with each run's blocks where `place` puts the run."""
    runs, inside = np.divmod(samples.blocks, per_run)
    moved = np.array([place[run] for run in range(len(place))])[runs]
    return dataclasses.replace(samples, blocks=moved * per_run + inside)

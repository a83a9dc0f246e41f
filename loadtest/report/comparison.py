"""One server against another under the same schedule: speedups, and the part of the ideal reached.

realized fraction = (measured speedup - 1) / (ideal speedup - 1): 1 is all that the smaller model
promises, 0 is no speedup, and below 0 the smaller model is slower. Prefill is judged by the median
TTFT, decode by the median TPOT.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from loadtest.errors import LoadTestError
from loadtest.report.bootstrap import Estimate, Floats, interval, percentile_draws
from loadtest.report.summary import MEASURES, PERCENTS, PooledRuns, Summary

PHASES = {"prefill": "ttft", "decode": "tpot"}
GOOD_ENOUGH = 0.99


@dataclass(frozen=True, slots=True)
class Comparison:
    """`label` against `baseline` at `rate`; speedup > 1 means that `label` is faster."""

    label: str
    baseline: str
    traffic: str
    rate: float
    speedup: dict[str, dict[float, Estimate]]
    ideal: dict[str, float]
    realized: dict[str, Estimate]


@dataclass(frozen=True, slots=True)
class Capacity:
    """What one server can take: `rate` is the highest tested rate with 99 % goodput.

    All lower tested rates reached 99 % goodput, too. None: not even the lowest did. Rates are
    requests per second.
    """

    label: str
    traffic: str
    rate: float | None
    tested: tuple[float, ...]


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
    """Every group against the baseline's group of the same schedule."""
    base = {group.schedule: group for group in groups if group.label == baseline}
    if not base:
        labels = sorted({group.label for group in groups})
        raise LoadTestError(f"no runs of baseline {baseline!r}; there are {', '.join(labels)}")
    unknown = {label for label, _ in ideals} - {group.label for group in groups}
    if unknown:
        raise LoadTestError(f"--ideal names {sorted(unknown)[0]!r}, of which there are no runs")
    return [
        _compare(base[group.schedule], group, ideals)
        for group in groups
        if group.label != baseline and group.schedule in base
    ]


def capacities(groups: Sequence[PooledRuns], summaries: Sequence[Summary]) -> list[Capacity]:
    """For each server and each kind of traffic, the highest rate with 99 % goodput."""
    tested: dict[tuple[str, str], list[tuple[float, bool]]] = {}
    for group, summary in zip(groups, summaries, strict=True):
        kept = summary.good_fraction.value >= GOOD_ENOUGH
        tested.setdefault((group.label, group.traffic), []).append((group.rate, kept))
    found = []
    for (label, traffic), results in tested.items():
        best = None
        for rate, kept in sorted(results):
            if not kept:
                break
            best = rate
        rates = tuple(rate for rate, _ in sorted(results))
        found.append(Capacity(label, traffic, best, rates))
    return found


def _compare(
    base: PooledRuns, other: PooledRuns, ideals: Mapping[tuple[str, str], float]
) -> Comparison:
    speedup = {
        measure: {p: interval(*_ratio(base, other, measure, p)) for p in PERCENTS}
        for measure in MEASURES
    }
    ideal = {
        phase: ideals[other.label, phase] for phase in PHASES if (other.label, phase) in ideals
    }
    realized = {}
    for phase, best in ideal.items():
        value, draws = _ratio(base, other, PHASES[phase], 50.0)
        realized[phase] = interval((value - 1) / (best - 1), (draws - 1) / (best - 1))
    return Comparison(other.label, base.label, other.traffic, other.rate, speedup, ideal, realized)


def _ratio(
    base: PooledRuns, other: PooledRuns, measure: str, percent: float
) -> tuple[float, Floats]:
    """baseline / other, and the same for every resample.

    If both have the same number of runs, a resample takes the same blocks of time from both, so
    the same requests: what they have in common by chance cancels.
    """
    a, a_draws = percentile_draws(base.samples[measure], percent, base.weights)
    b, b_draws = percentile_draws(other.samples[measure], percent, other.weights)
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(np.float64(a) / b), a_draws / b_draws

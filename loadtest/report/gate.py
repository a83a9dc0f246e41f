"""What `--fail-on worse` fails on: a server that is surely worse, and all that nobody can tell."""

import math
from collections.abc import Iterator, Sequence

from loadtest.report.comparison import ENOUGH_STARTS, Comparison
from loadtest.report.conclusion import judged, lacks_limits, ratios
from loadtest.report.summary import PooledRuns, scheduled_rate, traffic_of
from loadtest.runs.run import Run


def worse(
    runs: Sequence[Run],
    groups: Sequence[PooledRuns],
    comparisons: Sequence[Comparison],
    baseline: str | None,
    margin: float | None = None,
    these_starts: bool = False,
) -> list[str]:
    """What servers do worse than the baseline, or why nobody can tell.

    Each server must have valid runs wherever the baseline was measured, but for the rates of a
    search, of which each server has its own.

    Args:
        runs: all of them, also those that are INVALID.
        groups: the valid ones.
        comparisons: of these.
        baseline: the label of the server that others are compared with.
        margin: the fraction by which a server may be worse: it must surely not be so by more. Few
            starts tell no 99th percentile within a few percent, so of those it must not be seen to
            be worse by more and surely worse. None: it fails if it is surely worse, or if the data
            sets no limit to a median, to answered requests or to goodput.
        these_starts: whether a verdict of the starts that there are is enough.
    """
    if baseline is None:
        return ["whether a server is worse cannot be told without a baseline"]
    labels = list(dict.fromkeys(run.info["label"] for run in runs if run.info["label"] != baseline))
    if not labels:
        return [f"whether a server is worse cannot be told: all runs are of {baseline}"]
    wanted = dict.fromkeys(
        (traffic_of(run), scheduled_rate(run))
        for run in runs
        if run.info["label"] == baseline and not run.info.get("search")
    )
    if not wanted:
        return [f"whether a server is worse cannot be told: no run is of {baseline}"]
    there = {(g.label, g.traffic, g.rate): g for g in groups}
    compared = {(c.label, c.traffic, c.rate): c for c in comparisons}
    reasons = []
    for traffic, rate in wanted:
        base = there.get((baseline, traffic, rate))
        for label in labels:
            mine = there.get((label, traffic, rate))
            where = f"{label} at {rate:g}/s of {traffic}"
            if base is None or mine is None:
                who = baseline if base is None else label
                reasons.append(f"{where}: cannot be told, because {who} has no valid run there")
                continue
            versus = compared[label, traffic, rate]
            if versus.starts < (1 if these_starts else ENOUGH_STARTS):
                reasons.append(
                    f"{where}: cannot be told, because there are {versus.starts} of "
                    f"{ENOUGH_STARTS} starts; measure more, or judge --these-starts alone"
                )
                continue
            reasons += [f"{where}: {fault}" for fault in _faults(versus, base, mine, margin)]
    return reasons


def _faults(
    versus: Comparison, base: PooledRuns, mine: PooledRuns, margin: float | None
) -> Iterator[str]:
    if math.isnan(versus.length):
        yield "cannot be told: nobody knows how many tokens answers have"
    # Answers of one token, or of unknown length, have no time per token.
    has_tpot = any(group.samples["tpot"].values.size for group in (base, mine))
    for name, by_rate in ratios([versus]).items():
        for e in by_rate.values():
            if math.isnan(e.value):
                if has_tpot or not name.startswith("time per token"):
                    yield f"{name} cannot be told: a server has none, or both took forever"
            elif margin is None and judged(e) == "worse":
                yield f"{name} is {e.value:.2f}x as good"
            elif margin is None and lacks_limits(e) and not name.endswith("p99"):
                yield f"{name} cannot be told: its interval has no limits"
            elif margin is not None and e.low < 1 / (1 + margin):
                if name.endswith("p99") and not (e.value < 1 / (1 + margin) and judged(e)):
                    continue
                most = f"be up to {1 / e.low - 1:.0%} worse" if e.low > 0 else "have any value"
                yield f"{name} may {most}, margin {margin:.0%}"

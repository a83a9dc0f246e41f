"""The verdict on a run: it is INVALID if the client, not the server, was the bottleneck."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from loadtest.runs.health import ProcessHealth
from loadtest.runs.records import Record, is_the_clients, kind

# Limits on a valid client: seconds, and fractions of what is measured. The larger of both applies.
MAX_LATE = 0.0025
MAX_LAG_OF_TTFT = 0.05  # of the p99 by which requests are sent late
MAX_WAKE_OF_ITL = 0.25  # of the p99 by which sleeps overrun: the error of a token's time stamp
MAX_CPU = 0.80  # of one core, for each process: a greenlet loop uses one core at most


@dataclass(frozen=True, slots=True)
class Verdict:
    """`reasons` say why the run is INVALID. Each names the number, the limit and a remedy."""

    reasons: tuple[str, ...]
    lag_p99: float

    @property
    def valid(self) -> bool:
        """Whether the client kept up."""
        return not self.reasons


def judge(
    records: Sequence[Record],
    processes: Sequence[ProcessHealth],
    scheduled: int,
    expected_processes: int,
) -> Verdict:
    """Judge the client of a run of `scheduled` requests by `expected_processes` processes."""
    lags = np.array([r.lag for r in records if not math.isnan(r.sent)])
    p99 = float(np.percentile(lags, 99, method="inverted_cdf")) if len(lags) else math.nan
    reasons = []
    if len(records) != scheduled:
        left = scheduled - len(records)
        reasons.append(f"{left} of {scheduled} scheduled requests left no record")
    if len(processes) != expected_processes:
        reasons.append(f"{len(processes)} of {expected_processes} client processes finished")
    if mine := [r.error for r in records if r.error is not None and is_the_clients(r.error)]:
        reasons.append(
            f"{len(mine)} of {len(records)} requests failed by the client's own fault, not the "
            f"server's: {kind(mine[0])}; raise its limits (ulimit -n) or use more machines"
        )
    limit = max(MAX_LATE, MAX_LAG_OF_TTFT * _median([r.ttft for r in records if r.ok]))
    if p99 > limit:
        reasons.append(
            f"requests were sent {p99 * 1e3:.1f} ms late at the 99th percentile, limit "
            f"{limit * 1e3:.1f} ms; use more client processes or a machine of its own"
        )
    itl = _median([gap for record in records if record.ok for gap in record.itls])
    limit = max(MAX_LATE, MAX_WAKE_OF_ITL * itl)
    reasons += [
        f"process {p.process} woke {p.wake_p99 * 1e3:.1f} ms late for 1 % of the time, limit "
        f"{limit * 1e3:.1f} ms: its time stamps are off by that; use more client processes"
        for p in processes
        if p.wake_p99 > limit
    ]
    reasons += [
        f"process {p.process} used {p.cpu:.0%} of a core, limit {MAX_CPU:.0%}; use more "
        "client processes"
        for p in processes
        if p.cpu > MAX_CPU
    ]
    return Verdict(tuple(reasons), p99)


def _median(values: Sequence[float]) -> float:
    finite = [value for value in values if not math.isnan(value)]
    return float(np.median(finite)) if finite else 0.0

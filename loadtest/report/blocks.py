"""Blocks of time: how long a server remembers, and the parts of a run that count as independent.

A queue that was long a moment ago is still long. So the length of a block follows from what was
measured: the autocorrelation time of the number of requests under way, which is the server's state.
The turns of a session follow one another, so a session counts from its first turn to its last one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from loadtest.report.intervals import Floats, Ints
from loadtest.runs.run import Run

_MIN_SECONDS = 20.0  # seconds; simulated: shorter ones cover less even where the memory is short
_MEMORIES = 4.0
_STEP = 0.5
_END = 0.05  # the correlation below which the rest is noise


def memory(runs: Sequence[Run], windows: Sequence[tuple[float, float]]) -> float:
    """The autocorrelation time of what is under way, in seconds, over all runs."""
    series = [_under_way(run, window) for run, window in zip(runs, windows, strict=True)]
    mean = np.concatenate(series).mean()
    lengths = max(len(s) for s in series)
    together = np.zeros(lengths)
    for one in series:
        centred = one - mean
        together[: len(one)] += np.correlate(centred, centred, "full")[len(one) - 1 :]
    if together[0] <= 0:
        return _STEP
    correlation = together / together[0]
    low = np.flatnonzero(correlation < _END)
    until = int(low[0]) if len(low) else lengths
    return float(_STEP * (2 * correlation[:until].sum() - 1))


def block_seconds(window: float, remembers: float) -> float:
    """The length of a block in a window of `window` seconds, of which it is a whole part."""
    wished = max(_MIN_SECONDS, _MEMORIES * remembers)
    return window / max(int(window / wished + 0.25), 1)


@dataclass(frozen=True, slots=True)
class Blocks:
    """The blocks of one run's window: `count` of `width` seconds from `begin` on.

    Their numbers begin with `first`, because the blocks of all repeats are counted together.
    """

    begin: float
    width: float
    first: int
    count: int

    def of(self, times: Sequence[float] | Floats) -> Ints:
        """The number of the block of each time in the window."""
        offsets = (np.asarray(times, dtype=np.float64) - self.begin) / self.width
        inside = np.floor(offsets + 1e-9).astype(np.int64)
        return self.first + np.minimum(inside, self.count - 1)


def _under_way(run: Run, window: tuple[float, float]) -> Floats:
    begin, end = window
    requests = run.schedule.requests
    spans: dict[object, tuple[float, float]] = {}
    for number, record in enumerate((*run.records, *run.earlier)):
        due, ended = record.scheduled, end if np.isnan(record.ended) else record.ended
        session = requests[record.index].session_id if number < len(run.records) else None
        name = (number,) if session is None else session
        first, last = spans.get(name, (due, ended))
        spans[name] = min(first, due), max(last, ended)
    moments = np.arange(begin, end, _STEP)
    begun, over = np.sort(np.array(list(spans.values())).reshape(-1, 2), axis=0).T
    started = np.searchsorted(begun, moments, side="right")
    return (started - np.searchsorted(over, moments, side="right")).astype(np.float64)

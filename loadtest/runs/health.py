"""The health of a client process: its CPU share, and how late its loop wakes from short sleeps.

A busy process sends requests late and stamps tokens late, which would look like a slow server.
Lateness is weighted by time: of a client that freezes for 90 ms every 2.3 s, one sleep in a hundred
is late, but a token that comes at any moment has a chance of 4 % to be stamped late.
"""

import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
from pydantic import ConfigDict, TypeAdapter, ValidationError

from loadtest.errors import LoadTestError, faults
from vllm_gac.checkpoint.atomic_files import write_json

_NAP = 0.02


@dataclass(frozen=True, slots=True)
class ProcessHealth:
    """One client process.

    Attributes:
        process: its number.
        cpu: CPU seconds per second.
        wake_p50, wake_p99: by how many seconds an event is stamped late that comes at a random
            moment, because the process is not awake.
        wake_max: the longest time in seconds that it was not awake.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(
        extra="forbid", strict=True, allow_inf_nan=False
    )

    process: int
    cpu: float
    wake_p50: float
    wake_p99: float
    wake_max: float


class HealthMonitor:
    """Measures this process from construction until `stop`."""

    def __init__(self, process: int) -> None:
        self._process = process
        self._late: list[float] = []
        self._done = threading.Event()
        self._wall = time.perf_counter()
        self._cpu = time.process_time()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> ProcessHealth:
        """End the measurement and return its result."""
        self._done.set()
        self._thread.join()
        wall = time.perf_counter() - self._wall
        cpu = time.process_time() - self._cpu
        p50, p99 = late_at_any_moment(self._late, 50), late_at_any_moment(self._late, 99)
        return ProcessHealth(self._process, cpu / wall, p50, p99, float(max(self._late)))

    def _watch(self) -> None:
        while not (self._done.is_set() and self._late):
            before = time.perf_counter()
            time.sleep(_NAP)
            self._late.append(time.perf_counter() - before - _NAP)


def late_at_any_moment(late: Sequence[float], percent: float) -> float:
    """The percentile of the time until the process is awake again, seen from a random moment.

    Args:
        late: by how many seconds each of the successive sleeps of 20 ms overran.
        percent: 0 to 100.

    Returns:
        x such that the overruns are more than x from their end for 100 - `percent` % of the time.
    """
    overran = np.sort(np.maximum(np.asarray(late, dtype=np.float64), 0.0))[::-1]
    allowed = (1 - percent / 100) * (overran.sum() + _NAP * len(overran))
    # With the k longest overruns above x, sum(overran[:k]) - k x is the time beyond x.
    counts = np.arange(1, len(overran) + 1)
    return float(max(np.max((np.cumsum(overran) - allowed) / counts), 0.0))


def write_health(health: ProcessHealth, path: Path) -> None:
    """Write `health` to `path` as JSON."""
    write_json(path, asdict(health))


def read_health(path: Path) -> ProcessHealth:
    """Read the file of `write_health`. Raises LoadTestError for any other content."""
    try:
        return TypeAdapter(ProcessHealth).validate_json(path.read_bytes())
    except ValidationError as error:
        raise LoadTestError(
            f"{path}: not the health of a client process: {faults(error)[0]}"
        ) from error

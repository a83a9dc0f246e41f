"""The health of a client process: its CPU share, and how late its loop wakes from short sleeps.

A busy process sends requests late and stamps tokens late. Both would look like a slow server. So
every client process also measures itself during a run.
"""

import json
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from loadtest.errors import LoadTestError

_NAP = 0.02


@dataclass(frozen=True, slots=True)
class ProcessHealth:
    """One client process: CPU seconds per second, and by how many seconds 20 ms sleeps overran."""

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
        p50, p99 = np.percentile(self._late, [50, 99], method="inverted_cdf")
        return ProcessHealth(
            self._process, cpu / wall, float(p50), float(p99), float(max(self._late))
        )

    def late_since(self, count: int) -> list[float]:
        """The seconds by which sleeps overran, without the first `count` sleeps."""
        return self._late[count:]

    def _watch(self) -> None:
        while not (self._done.is_set() and self._late):
            before = time.perf_counter()
            time.sleep(_NAP)
            self._late.append(time.perf_counter() - before - _NAP)


def write_health(health: ProcessHealth, path: Path) -> None:
    """Write `health` to `path` as JSON."""
    path.write_text(json.dumps(asdict(health)) + "\n", encoding="utf-8")


def read_health(path: Path) -> ProcessHealth:
    """Read the file of `write_health`. Raises LoadTestError for any other content."""
    try:
        return ProcessHealth(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise LoadTestError(f"{path}: not the health of a client process: {error}") from error

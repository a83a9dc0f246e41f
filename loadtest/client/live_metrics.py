"""The metrics of one client process during a run, for Prometheus to scrape.

Latencies are histograms, because a scrape must not keep the process from its work. An alert on them
can warn during a run. The verdict after the run is computed from the exact records.
"""

import contextlib
import sys
import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from loadtest.runs.health import NAP, HealthMonitor, late_at_any_moment
from loadtest.runs.records import Record

# Bounds in seconds. The last two are vLLM's own for TTFT and ITL, so that one panel can show client
# and server.
_LATE = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0,
         7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)  # fmt: skip
_ITL = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
        10.0, 20.0, 40.0, 80.0)  # fmt: skip
_RECENT = int(15 / NAP)  # the sleeps of 15 s


class LiveMetrics:
    """The metrics of one client process, labelled with the name of the model that it requests."""

    def __init__(self, model: str, monitor: HealthMonitor, process: int) -> None:
        self.registry = registry = CollectorRegistry()
        names, own = ("model_name", "process"), (model, str(process))

        def histogram(name: str, text: str, bounds: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, names, buckets=bounds, registry=registry).labels(*own)

        late = "By how much requests were sent late."
        self._send_lag = histogram("loadtest_send_lag_seconds", late, _LATE)
        due = "From when a request was due to its first token."
        self._ttft = histogram("loadtest_ttft_seconds", due, _TTFT)
        self._itl = histogram("loadtest_itl_seconds", "Between successive streamed events.", _ITL)
        self._own, ended = own, "Requests that have ended."
        self._requests = Counter("loadtest_requests", ended, (*names, "outcome"), registry=registry)
        # What is computed when somebody asks.
        cpu = Gauge(
            "loadtest_cpu_seconds_total", "CPU time of this process.", names, registry=registry
        )
        cpu.labels(*own).set_function(time.process_time)
        wake = "How late events of the last 15 s would be stamped, 99th percentile."
        lag = Gauge("loadtest_wake_lag_seconds", wake, names, registry=registry)
        lag.labels(*own).set_function(
            lambda: late_at_any_moment(monitor.last(_RECENT) or [0.0], 99)
        )

    def add(self, record: Record) -> None:
        """Count a request that has ended. A request that was never sent has no lag."""
        outcome = "cancelled" if record.cancelled else "ok" if record.ok else "failed"
        self._requests.labels(*self._own, outcome).inc()
        if record.sent == record.sent:  # not NaN
            self._send_lag.observe(record.lag)
        if record.ok and record.tokens:
            self._ttft.observe(record.ttft)
            for gap in record.itls:
                self._itl.observe(gap)


@contextlib.contextmanager
def exported(metrics: LiveMetrics, port: int | None, process: int = 0) -> Iterator[int | None]:
    """Serve `metrics` on `port` + `process` while the block runs; port 0 takes any free port.

    Yields the port, or None if `port` is None or taken. A taken port is reported, but it does not
    stop the run.
    """
    if port is None:
        yield None
        return
    try:
        server, thread = start_http_server(port and port + process, registry=metrics.registry)
    except (OSError, OverflowError) as error:
        print(f"warning: --metrics-port {port}: process {process}: {error}", file=sys.stderr)
        yield None
        return
    try:
        yield int(server.server_port)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

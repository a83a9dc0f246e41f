"""The metrics of one client process during a run, for Prometheus to scrape.

Latencies are histograms, because a scrape must not keep the process from its work. An alert on them
can warn during a run. The verdict after the run is computed from the exact records.
"""

import bisect
import contextlib
import http.server
import json
import math
import socketserver
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence

from loadtest.runs.health import NAP, HealthMonitor
from loadtest.runs.records import Record

# Bounds in seconds. LATE_BUCKETS contains the limits of runs/verdict.py. The other two are vLLM's
# own buckets for TTFT and ITL, so that one panel can show client and server.
LATE_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0,
                7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)  # fmt: skip
ITL_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
               10.0, 20.0, 40.0, 80.0)  # fmt: skip


class Histogram:
    """A histogram of durations in seconds."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts: list[float] = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, values: Iterable[float]) -> None:
        """Count `values`, which must be finite."""
        for value in values:
            self._counts[bisect.bisect_left(self._bounds, value)] += 1
            self._sum += value

    def add_time(self, awake: float, late: float) -> None:
        """Count the milliseconds of a time by how late an event in them would be stamped.

        Args:
            awake: seconds in which it would be stamped at once.
            late: seconds in which the process was not awake. An event at their beginning would be
                this late, and one at their end not at all.
        """
        self._counts[0] += awake * 1e3
        low = 0.0
        for number, high in enumerate((*self._bounds, math.inf)):
            if late <= low:
                break
            self._counts[number] += (min(late, high) - low) * 1e3
            low = high
        self._sum += max(late, 0.0) ** 2 / 2 * 1e3

    def lines(self, name: str, labels: str) -> Iterator[str]:
        """The samples of the metric `name` in Prometheus' text format."""
        total: float = 0
        for bound, count in zip((*self._bounds, "+Inf"), self._counts, strict=True):
            total += count
            yield f'{name}_bucket{{{labels},le="{bound}"}} {total}'
        yield f"{name}_sum{{{labels}}} {self._sum!r}"
        yield f"{name}_count{{{labels}}} {total}"


class LiveMetrics:
    """The metrics of one client process, labelled with the name of the model that it requests."""

    def __init__(self, model: str, monitor: HealthMonitor, process: int) -> None:
        # JSON escapes quotes, backslashes and line ends as Prometheus' format does.
        name = json.dumps(model, ensure_ascii=False)
        self._labels = f'model_name={name},process="{process}"'
        self._monitor = monitor
        self._naps = 0
        self._requests = {"ok": 0, "failed": 0, "cancelled": 0}
        self._send_lag, self._wake_lag = Histogram(LATE_BUCKETS), Histogram(LATE_BUCKETS)
        self._ttft, self._itl = Histogram(TTFT_BUCKETS), Histogram(ITL_BUCKETS)

    def add(self, record: Record) -> None:
        """Count a request that has ended. A request that was never sent has no lag."""
        outcome = "cancelled" if record.cancelled else "ok" if record.ok else "failed"
        self._requests[outcome] += 1
        if record.sent == record.sent:  # not NaN
            self._send_lag.add([record.lag])
        if record.ok and record.tokens:
            self._ttft.add([record.ttft])
            self._itl.add(record.itls)

    def text(self) -> str:
        """All metrics so far, in Prometheus' text format."""
        naps = self._monitor.late_since(self._naps)
        self._naps += len(naps)
        for late in naps:
            self._wake_lag.add_time(NAP, late)
        return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        yield "# HELP loadtest_requests_total Requests that have ended."
        yield "# TYPE loadtest_requests_total counter"
        for outcome, count in self._requests.items():
            yield f'loadtest_requests_total{{{self._labels},outcome="{outcome}"}} {count}'
        yield "# HELP loadtest_cpu_seconds_total CPU time of this client process."
        yield "# TYPE loadtest_cpu_seconds_total counter"
        yield f"loadtest_cpu_seconds_total{{{self._labels}}} {time.process_time()!r}"
        for name, text, histogram in (
            ("loadtest_send_lag_seconds", "By how much requests were sent late.", self._send_lag),
            (
                "loadtest_wake_lag_seconds",
                "How late an event of each millisecond would be stamped.",
                self._wake_lag,
            ),
            (
                "loadtest_ttft_seconds",
                "From when a request was due to its first token.",
                self._ttft,
            ),
            ("loadtest_itl_seconds", "Between successive streamed events.", self._itl),
        ):
            yield f"# HELP {name} {text}"
            yield f"# TYPE {name} histogram"
            yield from histogram.lines(name, self._labels)


class _Server(socketserver.TCPServer):
    """A server of one scrape at a time.

    http.server.HTTPServer would look up its own host name before it listens.
    """

    allow_reuse_address = True


@contextlib.contextmanager
def exported(metrics: LiveMetrics, port: int | None, process: int = 0) -> Iterator[int | None]:
    """Serve `metrics` on `port` + `process` while the block runs; port 0 takes any free port.

    Yields the port, or None if `port` is None or taken. A taken port is reported, but it does not
    stop the run.
    """
    server = None if port is None else _listening(metrics, port, process)
    if server is None:
        yield None
        return
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield int(server.server_address[1])
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _listening(metrics: LiveMetrics, port: int, process: int) -> _Server | None:
    try:
        return _Server(("", port and port + process), _handler(metrics))
    except (OSError, OverflowError) as error:
        print(f"warning: --metrics-port {port}: process {process}: {error}", file=sys.stderr)
        return None


def _handler(metrics: LiveMetrics) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        timeout = 10  # seconds in which a scraper must send its request

        def do_GET(self) -> None:
            found = self.path.split("?")[0] == "/metrics"
            body = metrics.text().encode() if found else b""
            self.send_response(200 if found else 404)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing: locust's console is for the run."""

    return Handler

"""The metrics that a client process exports while it runs."""

import socket
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from loadtest.client.live_metrics import LATE_BUCKETS, Histogram, LiveMetrics, exported
from loadtest.runs.health import NAP, HealthMonitor, late_at_any_moment
from loadtest.runs.records import Record
from loadtest.runs.verdict import Limits
from tests.support.waiting import PATIENCE


def scraped(port: int | None) -> dict[str, dict[str, float]]:
    """{sample name: {le, outcome or nothing: value}} of a scrape."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE) as response:
        text = response.read().decode()
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            assert sample.labels["model_name"] == 'a "quoted"\\model'
            assert sample.labels["process"] == "3"
            key = sample.labels.get("le") or sample.labels.get("outcome") or ""
            found.setdefault(sample.name, {})[key] = sample.value
    return found


@pytest.fixture
def live() -> LiveMetrics:
    monitor = HealthMonitor(3)
    monitor.stop()
    return LiveMetrics('a "quoted"\\model', monitor, 3)


def test_a_scrape_counts_each_request_gap_and_nap_once(live: LiveMetrics) -> None:
    live.add(Record(0, 1.0, 5, 3, sent=1.003, tokens=[1.1, 1.13, 1.4], ended=1.5))
    live.add(Record(1, 2.0, 5, 3, sent=2.010, ended=2.5, error="HTTP 500"))
    live.add(Record(2, 3.0, 5, 3, error="never sent"))
    live.add(Record(3, 4.0, 5, 3, sent=4.0, cancelled=True))
    with exported(live, 0) as port:
        first, second = scraped(port), scraped(port)
    assert first["loadtest_requests_total"] == {"ok": 1, "failed": 2, "cancelled": 1}
    lag = first["loadtest_send_lag_seconds_bucket"]
    assert (lag["0.0025"], lag["0.005"], lag["0.025"], lag["+Inf"]) == (1, 2, 3, 3)
    assert first["loadtest_send_lag_seconds_sum"][""] == pytest.approx(0.013)
    assert first["loadtest_ttft_seconds_bucket"]["0.08"] == 0
    assert first["loadtest_ttft_seconds_bucket"]["0.25"] == 1
    itl = first["loadtest_itl_seconds_bucket"]
    assert (itl["0.025"], itl["0.05"], itl["0.3"], itl["+Inf"]) == (0, 1, 2, 2)
    assert first["loadtest_wake_lag_seconds_count"][""] >= 20  # milliseconds of one nap
    assert second["loadtest_wake_lag_seconds_count"] == first["loadtest_wake_lag_seconds_count"]
    assert second["loadtest_cpu_seconds_total"][""] >= first["loadtest_cpu_seconds_total"][""] > 0


def test_lateness_is_weighted_by_time_as_in_the_verdict() -> None:
    # One nap in a hundred overruns by 90 ms: for 4.3 % of the time an event is stamped late.
    histogram = Histogram(LATE_BUCKETS)
    naps = [0.0] * 99 + [0.09]
    for late in naps:
        histogram.add_time(NAP, late)
    counts = {
        line.split('le="')[1].split('"')[0]: float(line.split()[-1])
        for line in histogram.lines("late", 'a="b"')
        if "_bucket" in line
    }
    total = NAP * 1e3 * 100 + 90
    assert counts["+Inf"] == pytest.approx(total)
    assert counts["0.1"] == pytest.approx(total)
    # An event is more than 50 ms late in the first 40 of those 90 ms, and so on.
    assert counts["0.05"] == pytest.approx(total - 40)
    assert counts["0.01"] == pytest.approx(total - 80)
    p99 = late_at_any_moment(naps, 99)
    assert counts["0.05"] < 0.99 * total < counts["0.1"]
    assert 0.05 < p99 < 0.1


def test_the_limits_of_the_verdict_are_bounds() -> None:
    limits = Limits()
    assert {limits.lag, limits.wake} <= set(LATE_BUCKETS)


def test_other_paths_are_not_found(live: LiveMetrics) -> None:
    with exported(live, 0) as port, pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=PATIENCE)


def test_without_a_port_nothing_listens(live: LiveMetrics) -> None:
    with exported(live, None) as port:
        assert port is None


def test_process_n_listens_n_ports_on_and_a_taken_port_is_no_reason_to_stop(
    live: LiveMetrics, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        base = taken.getsockname()[1] - 1
        with exported(live, base, 1) as port:
            assert port is None
    assert f"warning: --metrics-port {base}: process 1: " in capsys.readouterr().err

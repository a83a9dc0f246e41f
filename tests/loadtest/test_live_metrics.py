"""The metrics that a client process exports while it runs."""

import socket
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from loadtest.client.live_metrics import LiveMetrics, exported
from loadtest.runs.health import HealthMonitor
from loadtest.runs.records import Record
from tests.support.waiting import PATIENCE


@pytest.fixture
def live() -> LiveMetrics:
    monitor = HealthMonitor(3)
    monitor.stop()
    return LiveMetrics('a "quoted"\\model', monitor, 3)


def test_a_scrape_counts_each_request_and_gap_once(live: LiveMetrics) -> None:
    live.add(Record(0, 1.0, 5, 3, sent=1.003, tokens=[1.1, 1.13, 1.4], ended=1.5))
    live.add(Record(1, 2.0, 5, 3, sent=2.010, ended=2.5, error="HTTP 500"))
    live.add(Record(2, 3.0, 5, 3, error="never sent"))
    live.add(Record(3, 4.0, 5, 3, sent=4.0, cancelled=True))
    with exported(live, 0) as port:
        url = f"http://127.0.0.1:{port}/metrics"
        text = urllib.request.urlopen(url, timeout=PATIENCE).read().decode()
    samples = {
        (sample.name, sample.labels.get("le") or sample.labels.get("outcome")): sample
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "model_name" in sample.labels
    }
    assert {s.labels["model_name"] for s in samples.values()} == {'a "quoted"\\model'}
    assert {s.labels["process"] for s in samples.values()} == {"3"}
    values = {key: sample.value for key, sample in samples.items()}
    outcomes = ("ok", "failed", "cancelled")
    assert [values["loadtest_requests_total", name] for name in outcomes] == [1, 2, 1]
    lag = "loadtest_send_lag_seconds_bucket"
    assert [values[lag, le] for le in ("0.0025", "0.005", "0.025", "+Inf")] == [1, 2, 3, 3]
    assert values["loadtest_ttft_seconds_bucket", "0.25"] == 1
    itl = "loadtest_itl_seconds_bucket"
    assert [values[itl, le] for le in ("0.025", "0.05", "0.3", "+Inf")] == [0, 1, 2, 2]
    assert values["loadtest_wake_lag_seconds", None] >= 0


def test_process_n_listens_n_ports_on_and_a_taken_port_is_no_reason_to_stop(
    live: LiveMetrics, capsys: pytest.CaptureFixture[str]
) -> None:
    with exported(live, None) as port:
        assert port is None
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        base = taken.getsockname()[1] - 1
        with exported(live, base, 1) as port:
            assert port is None
    assert f"--metrics-port {base}: process 1: " in capsys.readouterr().err

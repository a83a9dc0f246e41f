"""The metrics of many replicas on one page."""

import pytest

pytest.importorskip("prometheus_client")

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from serving_configs.ray.metrics import merged


def page(requests: int, *, latency: bool = True) -> str:
    registry = CollectorRegistry()
    Counter("vllm:requests", "Requests, with } and \\.", ["path"], registry=registry).labels(
        'a "quoted} {path, x="1"'
    ).inc(requests)
    Gauge("up_time", "No labels.", registry=registry).set(1.5)
    if latency:
        histogram = Histogram("latency_seconds", "Seconds.", buckets=[1, 2], registry=registry)
        histogram.observe(1.5)
    return generate_latest(registry).decode()


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_samples_keep_values_and_get_a_replica_label() -> None:
    pages = {"one": page(3), "two": page(5)}
    expected = {
        (name, tuple(sorted((*labels, ("replica", replica))))): value
        for replica, text in pages.items()
        for (name, labels), value in samples(text).items()
    }
    assert samples(merged(pages)) == expected
    assert len(expected) == 2 * len(samples(page(3)))


def test_each_metric_has_one_header() -> None:
    """Also one that the first replica has not."""
    text = merged({"one": page(3, latency=False), "two": page(5), "three": page(1)})
    headers = [line for line in text.splitlines() if line.startswith("# TYPE")]
    assert headers.count("# TYPE latency_seconds histogram") == 1
    assert len(headers) == len(set(headers))
    families = [family.name for family in text_string_to_metric_families(text)]
    assert len(families) == len(set(families))
    assert 'latency_seconds_count{replica="two"} 1.0' in text


def test_empty_page_of_a_replica_adds_nothing() -> None:
    two = page(5)
    assert merged({"one": "", "two": two}) == merged({"two": two})
    assert merged({}) == ""

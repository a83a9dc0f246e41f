"""The load test in a process that also computes, 0.3 s at a time. Such a client is INVALID."""

import time
from typing import Any

import gevent
from locust import events

from loadtest.locustfile import Idle  # noqa: F401  (locust looks for users here)


@events.test_start.add_listener
def _starve(**_: Any) -> None:
    gevent.spawn(_compute)


def _compute() -> None:
    while True:
        until = time.perf_counter() + 0.3
        while time.perf_counter() < until:
            pass
        gevent.sleep(0.005)

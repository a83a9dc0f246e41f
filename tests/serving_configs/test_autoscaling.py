"""What the committed ScaledObject does to replicas under steady load, simulated."""

import dataclasses

import pytest

from serving_configs.k8s.autoscaling import CAPACITY, committed, prometheus_lost, simulate

RULE = committed()
# As it was: the queue alone says how many replicas are needed.
WAITING = dataclasses.replace(RULE, running=False, threshold=5, down_window=900)


@pytest.mark.parametrize("load", [0.5, 0.75, 0.92, 1.3, 1.8, 3.0])
def test_at_a_steady_load_replicas_stay_and_nobody_waits(load: float) -> None:
    got = simulate(RULE, load * CAPACITY)
    assert got.waiting < 0.001
    assert got.changes <= 3  # an hour, near a threshold; the others have none
    assert got.mean > load


def test_replicas_by_the_queue_alone_swing() -> None:
    got = simulate(WAITING, 1.3 * CAPACITY)
    assert got.waiting > 0.1
    assert got.changes > 5


def test_losing_prometheus_costs_no_replica() -> None:
    got = simulate(RULE, 2.3 * CAPACITY, prometheus=prometheus_lost)
    assert got.fewest >= 3
    assert got.waiting < 0.001


def test_a_fallback_would_cost_replicas_when_prometheus_is_lost() -> None:
    fallback = dataclasses.replace(RULE, fallback=2)
    got = simulate(fallback, 2.3 * CAPACITY, prometheus=prometheus_lost)
    assert got.fewest == 2
    assert got.waiting > 0.1


def test_a_load_that_grows_and_falls_is_followed_within_its_limits() -> None:
    few, many = (simulate(RULE, load * CAPACITY, hours=2) for load in (0.2, 5.0))
    assert (few.mean, few.changes) == (RULE.minimum, 0)
    assert (many.mean, many.changes) == (RULE.maximum, 0)
    assert many.waiting == 1  # four replicas do not carry five

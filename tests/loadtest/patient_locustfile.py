"""The load test on a machine that is busy otherwise: no worker is given up for being slow."""

from locust import runners

from loadtest.locustfile import Idle  # noqa: F401  (locust looks for users here)

runners.HEARTBEAT_LIVENESS = 600  # heartbeats, one a second; locust waits for three

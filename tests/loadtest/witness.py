"""A process that only sleeps, and measures how late the machine wakes it.

It runs until its standard input ends. Then it prints the 99th percentile in seconds.
"""

import sys

from loadtest.runs.health import HealthMonitor

if __name__ == "__main__":
    monitor = HealthMonitor(0)
    sys.stdin.read()
    print(monitor.stop().wake_p99)

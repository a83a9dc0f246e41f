"""A process that does nothing but sleep, and says how late the machine let it wake.

Runs until its standard input ends; then prints the 99th percentile, in seconds.
"""

import sys

from loadtest.runs.health import HealthMonitor

if __name__ == "__main__":
    monitor = HealthMonitor(0)
    sys.stdin.read()
    print(monitor.stop().wake_p99)

"""Waiting for what another process does, however busy the machine is."""

import contextlib
import time
from collections.abc import Callable
from typing import Any

import psutil


def wait_until(condition: Callable[[], Any], seconds: float, what: str) -> None:
    """Poll `condition`, for which a connection refused or cut is a no."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, psutil.Error):
            if condition():
                return
        time.sleep(0.1)  # requests that have to be seen running may take no longer than a second
    raise TimeoutError(f"not within {seconds} s: {what}")

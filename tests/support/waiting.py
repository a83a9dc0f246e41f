"""Waiting for what another process does, however busy the machine is."""

import contextlib
import time
from collections.abc import Callable, Iterable
from typing import Any

import psutil

PATIENCE = 300.0  # seconds until what a busy machine has not done counts as not done


def wait_until(condition: Callable[[], Any], seconds: float, what: str) -> None:
    """Poll `condition`, for which a connection refused or cut is a no."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, psutil.Error):
            if condition():
                return
        time.sleep(0.1)  # requests that have to be seen running may take no longer than a second
    raise TimeoutError(f"not within {seconds} s: {what}")


def wait_until_gone(processes: Iterable[psutil.Process]) -> None:
    """Wait until all have ended, be it that nobody has asked how."""
    for process in processes:
        wait_until(lambda one=process: _is_gone(one), PATIENCE, f"the end of {process}")


def _is_gone(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True

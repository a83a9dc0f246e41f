"""Starts a server for a measurement and makes sure that it is stopped afterwards."""

import contextlib
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from loadtest.ab.keeper import kept
from loadtest.errors import LoadTestError


@contextlib.contextmanager
def running_server(
    command: Sequence[str],
    environment: Mapping[str, str],
    base_url: str,
    log: Path,
    patience: float,
) -> Iterator[None]:
    """Run `command` until the block ends. The block begins when BASE_URL/health answers 200.

    Raises LoadTestError as `starting_server` and what it yields do.
    """
    with starting_server(command, environment, base_url, log, patience) as wait:
        wait()
        yield


@contextlib.contextmanager
def starting_server(
    command: Sequence[str],
    environment: Mapping[str, str],
    base_url: str,
    log: Path,
    patience: float,
) -> Iterator[Callable[[], None]]:
    """Run `command` until the block ends, and yield what waits for BASE_URL/health to answer 200.

    That raises LoadTestError with the end of the log if it takes longer than `patience` seconds or
    if the server exits. LoadTestError is also raised if another server answers on the port already,
    because that server would be measured instead.
    """
    url = urlsplit(base_url)
    with contextlib.suppress(OSError), socket.create_connection((url.hostname, url.port), 2):
        raise LoadTestError(f"{base_url}: something listens there already; stop it")
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output, kept(command, output, environment) as process:
        yield lambda: _wait_until_healthy(process, base_url, log, patience)


def _wait_until_healthy(
    process: subprocess.Popen[bytes], base_url: str, log: Path, patience: float
) -> None:
    give_up = time.monotonic() + patience
    while time.monotonic() < give_up:
        if process.poll() is not None:
            raise LoadTestError(f"the server exited with {process.returncode}; {end_of(log)}")
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{base_url}/health", timeout=5):
            return
        time.sleep(0.25)
    raise LoadTestError(f"the server did not get healthy in {patience:g} s; {end_of(log)}")


def end_of(log: Path) -> str:
    """The last lines of a log, and where it lies."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:]
    return f"the end of {log}:\n" + "\n".join(lines)

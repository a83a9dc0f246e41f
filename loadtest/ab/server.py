"""Starts a server for a measurement and makes sure that it is stopped afterwards."""

import contextlib
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from loadtest.ab.keeper import kept
from loadtest.errors import LoadTestError
from loadtest.runs.access import get
from loadtest.runs.target import Target
from vllm_gac.errors.sanitize import sentence


@dataclass(frozen=True, slots=True)
class Running:
    """A server that was started, or one that somebody else runs, without a process and a log."""

    process: "subprocess.Popen[bytes] | None"
    base_url: str
    log: Path | None
    patience: float
    since: float = field(default_factory=time.time)

    def wait(self) -> None:
        """Wait until BASE_URL/health answers 200.

        Raises LoadTestError with the end of the log if that takes longer than `patience` seconds or
        if the server exits.
        """
        give_up, target = time.monotonic() + self.patience, Target(self.base_url, "")
        while time.monotonic() < give_up:
            self.check()
            with contextlib.suppress(OSError):
                if get(target, "/health", 5.0, 1)[0] == 200:
                    return
            time.sleep(0.25)
        raise LoadTestError(
            f"the server did not get healthy in {self.patience:g} s; {end_of(self.log)}"
        )

    def check(self) -> None:
        """Raise LoadTestError with the end of the log if the server has exited."""
        if self.process is not None and (status := self.process.poll()) is not None:
            raise LoadTestError(f"the server exited with {status}; {end_of(self.log)}")


@contextlib.contextmanager
def running_server(
    command: Sequence[str],
    environment: Mapping[str, str],
    base_url: str,
    log: Path,
    patience: float,
) -> Iterator[Running]:
    """Run `command` until the block ends. The block begins when BASE_URL/health answers 200.

    Raises LoadTestError if another server answers on the port already, because that server would be
    measured instead, or as what it yields does.
    """
    url = urlsplit(base_url)
    with contextlib.suppress(OSError), socket.create_connection((url.hostname, url.port), 2):
        raise LoadTestError(f"{base_url}: something listens there already; stop it")
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output, kept(command, output, environment) as process:
        server = Running(process, base_url, log, patience)
        server.wait()
        yield server


def remote(target: Target) -> Running:
    """A server that somebody else runs. Raises LoadTestError if it does not let this client in."""
    try:
        status, _ = get(target, "/v1/models", 30.0, 1)
    except ssl.SSLCertVerificationError as error:
        raise LoadTestError(
            f"{target.base_url}: its certificate is not believed ({error.verify_message}); give "
            "`ca`, the file of its authority, or insecure: true"
        ) from error
    except OSError as error:
        raise LoadTestError(f"{target.base_url}: no answer: {error}") from error
    if status in (401, 403):
        raise LoadTestError(
            f"{target.base_url}: HTTP {status}: it refuses the key; set OPENAI_API_KEY or key_file"
        )
    return Running(None, target.base_url, None, 0.0)


def end_of(log: Path | None) -> str:
    """Print the last lines of a log, because an error has one line; returns where all of it is."""
    if log is None:
        return "look into the log of the server"
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:]:
        print(f"  | {sentence(line)}", file=sys.stderr)
    return f"the end of its log is above, and all of it in {log}"

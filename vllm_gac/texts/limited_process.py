"""A process with a limit to its memory, for what strangers wrote and a library computes."""

import multiprocessing
import resource
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


class LimitedProcess:
    """A process that answers over `connection`, and ends with this object or who started it.

    Args:
        memory: How many bytes it may take beside what this process has.
        target: What it runs: a function of its end of the connection and `arguments`.
        arguments: As they are in this process.
    """

    def __init__(self, memory: int, target: Callable[..., None], *arguments: Any) -> None:
        # A fork, because a new interpreter takes seconds to import what is needed.
        context = multiprocessing.get_context("fork")
        self.connection, theirs = context.Pipe()
        inherited = (theirs, self.connection, memory, target, *arguments)
        self.process = context.Process(target=_run, args=inherited, daemon=True)
        self.process.start()
        theirs.close()

    def __enter__(self) -> "LimitedProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()
        self.process.kill()  # at once: whoever computes in C, or waits there, hears no SIGTERM
        self.process.join()  # it inherited the lock of our workspace


def _run(
    connection: Connection,
    parents: Connection,
    memory: int,
    target: Callable[..., None],
    *arguments: Any,
) -> None:
    parents.close()  # the copy of a fork; with it, the pipe would outlive a parent that is killed
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who reads the answers decides when to end
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (_data_bytes() + memory, hard))
    target(connection, *arguments)


def _data_bytes() -> int:
    """The private memory of this process, which RLIMIT_DATA limits."""
    status = Path("/proc/self/status").read_text()
    (data,) = (line.split()[1] for line in status.splitlines() if line.startswith("VmData:"))
    return int(data) << 10

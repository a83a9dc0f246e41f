"""vLLM's engine in a process of its own.

Several engines can be up at once. The caller asks one at a time, so that each measurement has the
GPU to itself. A process imports vLLM as soon as it starts, and makes the engine when it is told to.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


class EngineError(RuntimeError):
    """An engine failed, died or took too long."""


class Engine:
    """A process that makes one `vllm.LLM` and calls functions with it.

    Messages are pickled, so every function that is asked must be importable: it cannot belong to a
    module that runs as `__main__`.
    """

    def __init__(self, name: str, log: Path, **environment: str) -> None:
        """Start the process, which imports vLLM.

        Args:
            name: Name for messages.
            log: File for the output of the process.
            environment: Environment variables beside those of this process.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        self.name, self.log = name, log
        self._connection, theirs = Pipe()
        with log.open("w") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[theirs.fileno()],
                # Functions that are asked send functions of theirs to vLLM's workers.
                env=os.environ | {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"} | environment,
                process_group=0,  # so that `close` also ends the processes that vLLM starts
            )
        theirs.close()
        self._startup_seconds: float | None = None
        self._error: EngineError | None = None

    def start(self, **options: Any) -> None:
        """Make `LLM(**options)`, without waiting for it."""
        self._send(options)

    def wait(self, seconds: float | None = None) -> float:
        """Wait until the engine is up.

        Args:
            seconds: How long to wait at most.

        Returns:
            The seconds that `LLM(...)` took.

        Raises:
            EngineError: The engine did not start, or not in time.
        """
        if self._startup_seconds is None:
            self._startup_seconds = self._receive(seconds)
            print(f"{self.name}: up after {self._startup_seconds:.0f} s", flush=True)
        return self._startup_seconds

    def ask(
        self, function: Callable[..., Any], *, seconds: float | None = None, **arguments: Any
    ) -> Any:
        """Call `function(llm, **arguments)` in the process once the engine is up.

        Args:
            function: A function of a module's top level.
            seconds: How long to wait for the result at most.
            arguments: Arguments that can be pickled.

        Returns:
            The result of the call.

        Raises:
            EngineError: The engine or the function failed. An engine that failed answers nothing
                more: every later call raises the same error.
        """
        self.wait(seconds)
        self._send((function, arguments))
        return self._receive(seconds)

    def close(self) -> None:
        """End the process and every process that it started."""
        self._connection.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _send(self, message: Any) -> None:
        # `_receive` reports a process that died.
        with contextlib.suppress(ConnectionError):
            self._connection.send(message)

    def _receive(self, seconds: float | None) -> Any:
        if self._error is None:
            result, error = self._answer(seconds)
            if error is None:
                return result
            self._error = EngineError(error)
        raise self._error

    def _answer(self, seconds: float | None) -> tuple[Any, str | None]:
        """A result, or in its place what went wrong."""
        deadline = None if seconds is None else time.monotonic() + seconds
        # The end of the connection says nothing: processes that vLLM forks keep it open.
        while not self._connection.poll(0.1):
            if self._process.poll() is not None and not self._connection.poll():
                return None, self._last_words()
            if deadline is not None and time.monotonic() > deadline:
                return None, f"no answer after {seconds:.0f} s; see {self.log}"
        try:
            answer: tuple[Any, str | None] = self._connection.recv()
        except (EOFError, ConnectionError):
            return None, self._last_words()
        return answer

    def _last_words(self) -> str:
        return f"died: {self.log.read_text()[-500:]}"


def main(descriptor: int) -> None:
    """Run in the process: make the engine, then answer until the caller closes the connection."""
    from vllm_gac.serving.plugin import register

    register()  # where the package is a folder on the path, it has no entry points
    from vllm import LLM

    os.set_inheritable(descriptor, False)
    connection = Connection(descriptor)
    try:
        options = connection.recv()
        start = time.perf_counter()
        llm = LLM(**options)
        connection.send((time.perf_counter() - start, None))
        while True:
            function, arguments = connection.recv()
            connection.send((function(llm, **arguments), None))
    except EOFError:  # the caller is done
        return
    except Exception as e:
        connection.send((None, f"{type(e).__name__}: {e}"[:800]))
        raise


if __name__ == "__main__":
    main(int(sys.argv[1]))

"""The `vllm serve` process of a replica, and everything that it starts."""

import asyncio
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from pathlib import Path

from aiohttp import ClientError, ClientSession

# Where vLLM says why it stopped: the last line of a traceback, of pydantic's, or of argparse's.
CAUSE = re.compile(r"(?:Value error, |\b\w*[Ee]rror: )(.+?)(?: \[type=.*)?$")
NOT_THE_CAUSE = "See root cause above"
STOP_SECONDS = 60


class EngineStartError(RuntimeError):
    """`vllm serve` ended before it was healthy; the message is what it said last."""


class Engine:
    """A `vllm serve` on a Unix socket, in a process group of its own.

    A socket in a new directory cannot be taken by somebody else, as a port can between the moment
    it is found free and the moment, seconds later, when vLLM listens on it.
    """

    def __init__(self, model: str, flags: list[str]) -> None:
        self._directory = tempfile.mkdtemp(prefix="vllm-gac-")
        self.socket = f"{self._directory}/http"
        self._last_lines: deque[str] = deque(maxlen=200)
        child = str(Path(__file__).with_name("vllm_child.py"))
        # -P: the directory of vllm_child.py is no place to import from.
        command = [sys.executable, "-P", child, "serve", model, *flags, "--uds", self.socket]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,  # vllm_child.py watches its other end
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._output = threading.Thread(target=self._pass_output_on, daemon=True)
        self._output.start()

    def _pass_output_on(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._last_lines.append(line.rstrip())
            print(line, end="", file=sys.stderr, flush=True)  # Ray's logs of this replica

    def running(self) -> bool:
        return self._process.poll() is None

    async def wait_until_healthy(self, session: ClientSession) -> None:
        """As long as it takes: loading depends on the model.

        Raises:
            EngineStartError: it ended instead.
        """
        try:
            while self.running():
                with contextlib.suppress(ClientError):
                    async with session.get("/health") as answer:
                        if answer.ok:
                            return
                await asyncio.sleep(0.2)
        except BaseException:
            self.stop()
            raise
        code = self._process.wait()
        self.stop()
        self._output.join(STOP_SECONDS)  # the cause is often in the last line
        raise EngineStartError(f"vllm serve ended with exit code {code}: {self._cause()}")

    def _cause(self) -> str:
        for line in reversed(self._last_lines):
            if (found := CAUSE.search(line)) and NOT_THE_CAUSE not in line:
                return found[1]
        return self._last_lines[-1] if self._last_lines else "it said nothing"

    def stop(self) -> None:
        """End vLLM, which finishes what it answers, for its own `--shutdown-timeout` at most."""
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_SECONDS)
        # What is left of it: engine core and workers, if `vllm serve` itself was killed.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        shutil.rmtree(self._directory, ignore_errors=True)

"""A module of ours in a process of its own, which begins when it is told to."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def ended(process: "Process") -> Iterator["Process"]:
    """`process`, which does not outlive the block."""
    try:
        yield process
    finally:
        process.kill()


class Process:
    """`python -m module arguments`, its output in a log, its compiled code in `cache`."""

    def __init__(self, module: str, log: Path, *arguments: str | Path, cache: Path) -> None:
        self.log = log
        environment = os.environ | {
            "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
            "VLLM_CACHE_ROOT": str(cache / "vllm"),
            "TRITON_CACHE_DIR": str(cache / "triton"),
            "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        }
        with log.open("w") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, *map(str, arguments)],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=out,
                env=environment,
                process_group=0,  # to end with all that it starts
            )

    def go(self) -> None:
        """Have it begin, if it still waits."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(b"go\n")
            self.process.stdin.close()

    def wait(self, longest: float) -> float:
        """The seconds until it ended, with success or not; it is ended after `longest`."""
        begun, said = time.monotonic(), ""
        try:
            code = self.process.wait(longest)
            said = f": failed, see {self.log}" if code else ""
        except subprocess.TimeoutExpired:
            said = f": ended, see {self.log}"
        finally:
            self.kill()
        seconds = time.monotonic() - begun
        print(f"{seconds:6.1f} s  {self.log.stem}{said}", flush=True)
        return seconds

    def kill(self) -> None:
        """End it and all that it started, whatever of them has not ended."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

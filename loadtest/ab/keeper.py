"""A keeper: a process that starts a command, and ends all of its processes when its parent is gone.

A server that outlives a killed measurement keeps a GPU's memory. The keeper's standard input is a
pipe that only the measurement holds open, and the kernel closes it, however that ends. On Linux,
processes that detach themselves from the command become children of the keeper, which ends them.
"""

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import IO

import psutil

_GRACE = 30.0  # seconds after SIGTERM
_LOOK_EVERY = 0.1  # seconds
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


@contextlib.contextmanager
def kept(
    command: Sequence[str], output: IO[bytes], environment: Mapping[str, str] | None = None
) -> Iterator["subprocess.Popen[bytes]"]:
    """Run `command` until the block ends, or this process does; yield its keeper.

    The keeper exits as the command does, with 127 if that cannot start. It is in a session of its
    own, so that Ctrl-C reaches only this process.

    Args:
        command: Program and arguments.
        output: A file for what both write.
        environment: Variables beside those of this process.
    """
    keeper = subprocess.Popen(
        # By its file, because the environment may be one in which this package is not found.
        [sys.executable, "-I", __file__, *command],
        env={**os.environ, **(environment or {})},
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    assert keeper.stdin is not None
    try:
        yield keeper
    finally:
        keeper.stdin.close()
        keeper.wait()


def _main(command: list[str]) -> int:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    except OSError as error:
        print(f"cannot start {command[0]}: {error.strerror}", file=sys.stderr)
        return 127
    # Nothing is ever written to the pipe: what can be read is its end.
    while (status := child.poll()) is None:
        if select.select([sys.stdin], [], [], _LOOK_EVERY)[0]:
            break
    _end_all()
    if status is None:
        return 128 + signal.SIGTERM
    return status if status >= 0 else 128 - status


def _end_all() -> None:
    for signal_number in (signal.SIGTERM, signal.SIGKILL):
        processes = psutil.Process().children(recursive=True)
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal_number)
        psutil.wait_procs(processes, _GRACE)


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))

"""The `vllm` command, except that it ends with the replica that started it.

A replica that is killed (out of memory, `kill -9`, a lost node's raylet) cannot stop its vLLM,
which would keep the GPU that the next replica needs. Standard input is a pipe from the replica: the
kernel closes it whatever way the replica ends.
"""

import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

GRACE_SECONDS = 30


def main() -> None:
    threading.Thread(target=_end_with_replica, daemon=True).start()
    sys.argv[0] = "vllm"
    from vllm.entrypoints.cli.main import main as vllm

    vllm()


def _end_with_replica() -> None:
    socket = Path(sys.argv[-1])  # engine.py puts it last
    while os.read(0, 1):
        pass
    shutil.rmtree(socket.parent, ignore_errors=True)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_SECONDS)
    os.killpg(0, signal.SIGKILL)  # the group is vLLM's own: engine.py starts a session for it


if __name__ == "__main__":
    main()

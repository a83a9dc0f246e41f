"""`kill -9` right before one of the changes that a process makes on disk.

They are what Python's audit hooks report. What safetensors does in Rust no hook reports: the
process is killed with half a file of its own, and once the whole file is there, which only its
owner may read.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

_CHANGES = {
    "open",
    "os.rename",
    "os.remove",
    "os.rmdir",
    "os.mkdir",
    "shutil.rmtree",
    "os.truncate",
    "os.chmod",
}


def kill_before_change(number: int, out: Path) -> None:
    """Have this process kill itself before its change of this number to what is at `out`."""
    from safetensors import torch as safetensors

    seen, save_file = 0, safetensors.save_file

    def change() -> None:
        nonlocal seen
        seen += 1
        if seen == number:
            os.kill(os.getpid(), signal.SIGKILL)

    def save_in_steps(tensors: Any, path: Path, metadata: Any) -> None:
        beside = path.with_name(".tmpA1b2C3")
        beside.touch(0o600)
        beside.write_bytes(b"half")
        change()
        beside.unlink()
        save_file(tensors, path, metadata)
        change()

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event not in _CHANGES or not any(str(a).startswith(str(out)) for a in arguments):
            return
        if event == "open" and not _writes(arguments[2]):
            return
        change()

    safetensors.save_file = save_in_steps
    sys.addaudithook(hook)


def _writes(flags: object) -> bool:
    return bool(isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR))

"""`vllm-gac heal` as a process whose writer dies in place of saving.

    [torchrun --nproc-per-node 2] -m tests.steps.heal.killed_heal heal MODEL ...

The process that saves dies when it would save for the KILLED_AT-th time, and saves after every step
until then.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

from vllm_gac.cli import main
from vllm_gac.healing import train
from vllm_gac.healing.state_file import write_state

KILLED_AT = "KILLED_AT"


def _die_in_place_of_saving(number: int) -> None:
    saves: list[Path | None] = []

    def write_or_die(path: Path | None, *arguments: Any) -> None:
        saves.append(path)
        if len(saves) == number and path is not None:  # the process that writes
            os.kill(os.getpid(), signal.SIGKILL)
        write_state(path, *arguments)

    vars(train).update(_SAVING=0, write_state=write_or_die)


if __name__ == "__main__":
    _die_in_place_of_saving(int(os.environ[KILLED_AT]))
    sys.exit(main(sys.argv[1:]))

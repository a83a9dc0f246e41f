"""`vllm-gac heal` as a process that tells its time and memory, or dies in place of saving.

    [torchrun --nproc-per-node 2] -m benchmarks.quality.heal_process TOLD.json heal MODEL ...

The first process writes TOLD.json: the seconds of each step, and the GB that PyTorch took of its
GPU. If KILLED_AT=N is set, the process that saves dies when it would save for the Nth time, and
saves after every step until then.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from vllm_gac.cli import main
from vllm_gac.healing import train
from vllm_gac.healing.state_file import write_state

KILLED_AT = "KILLED_AT"


def run(told: Path, arguments: list[str]) -> int:
    """Heal. Returns the exit status."""
    seconds: list[float] = []
    _time_steps(seconds)
    if number := os.environ.get(KILLED_AT):
        _die_in_place_of_saving(int(number))
    status = main(arguments)
    if status == 0 and os.environ.get("RANK", "0") == "0":
        on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
        gb = torch.cuda.max_memory_reserved() / 1e9 if on_gpu else None
        told.write_text(json.dumps({"seconds": seconds, "gpu_gb": gb}))
    return status


def _time_steps(seconds: list[float]) -> None:
    step = train.Healing.step

    def timed(healing: train.Healing, *arguments: Any) -> bool:
        begun = time.monotonic()
        finite = step(healing, *arguments)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        seconds.append(time.monotonic() - begun)
        return finite

    train.Healing.step = timed


def _die_in_place_of_saving(number: int) -> None:
    saves: list[Path | None] = []

    def write_or_die(path: Path | None, *arguments: Any) -> None:
        saves.append(path)
        if len(saves) == number and path is not None:  # the process that writes
            os.kill(os.getpid(), signal.SIGKILL)
        write_state(path, *arguments)

    vars(train).update(_SAVING=0, write_state=write_or_die)


if __name__ == "__main__":
    sys.exit(run(Path(sys.argv[1]), sys.argv[2:]))

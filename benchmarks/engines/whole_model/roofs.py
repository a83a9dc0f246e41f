"""The file of the machine's rates, from which ideal times are computed."""

import subprocess
import sys
from pathlib import Path

_MEASURING = "benchmarks.engines.whole_model.gpu_rates"


def measure_roofs(out: Path, log: Path, longest: float) -> None:
    """Write the rates from a process of its own, which leaves the GPU as it found it.

    Args:
        out: JSON file.
        log: File for what the process prints.
        longest: Seconds after which it is given up.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as output:
        command = [sys.executable, "-m", _MEASURING, str(out)]
        subprocess.run(command, stdout=output, stderr=output, timeout=longest, check=True)

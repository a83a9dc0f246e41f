"""The file of the machine's rates, from which ideal times are computed."""

import json
import subprocess
import sys
from pathlib import Path

from benchmarks.engines.whole_model.ideal import Roofs

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


def read_roofs(path: Path) -> Roofs:
    """The rates in the file. Older files have none of FP8."""
    rates = json.loads(path.read_text())
    return Roofs(
        rates["bytes_per_second"],
        rates["flops_per_second"],
        rates.get("fp8_flops_per_second"),
    )

"""Run a module with test cases in Triton's interpreter, without a GPU."""

import os
import subprocess
import sys


def run_interpreted(module: str, *arguments: object) -> str:
    """Run `python -m module arguments`, which must succeed, and return its output."""
    # It has its own process, because Triton decides on import whether it interprets.
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-m", module, *map(str, arguments)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout

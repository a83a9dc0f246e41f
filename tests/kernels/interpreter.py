"""Test cases that are a module of their own, run in Triton's interpreter: no GPU is needed."""

import os
import subprocess
import sys


def run_interpreted(module: str, *arguments: object) -> str:
    """What `python -m module arguments` prints there. It must succeed."""
    # In its own process: Triton decides on import whether it interprets.
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-m", module, *map(str, arguments)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout

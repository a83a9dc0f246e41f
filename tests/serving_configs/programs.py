"""Programs that the configs are for, from the machine or from where `make test` unpacked them."""

import os
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "serving_configs"
UNPACKED = ROOT / "build" / "debian" / "usr"


def program(name: str) -> str:
    """Where `name` is; skips the test on a machine that has it not."""
    places = [os.environ.get("PATH", ""), str(UNPACKED / "bin"), str(UNPACKED / "sbin")]
    executable = shutil.which(name, path=os.pathsep.join(places))
    if executable is None:
        pytest.skip(f"needs {name}, which neither PATH nor build/debian has; `make test` gets it")
    return executable

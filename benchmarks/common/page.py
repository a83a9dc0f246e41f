"""Where a result comes from: the commit of the sources, the machine and its software."""

import argparse
import platform
import shutil
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from typing import Any


def documented(description: str | None) -> argparse.ArgumentParser:
    """A parser whose --help shows the docstring of a command as it is."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def add_commit(parser: argparse.ArgumentParser) -> None:
    """Add --commit, for machines that have the sources without .git."""
    parser.add_argument("--commit", help="git commit, where the sources came without .git")


def source(commit: str | None = None) -> dict[str, Any]:
    """The commit of the sources (git's, unless it is given; "unknown" without) and the date."""
    described = "unknown"
    if shutil.which("git") is not None:
        git = ["git", "describe", "--always", "--dirty", "--exclude=*"]
        done = subprocess.run(git, capture_output=True, text=True, check=False)
        described = done.stdout.strip() if done.returncode == 0 else described
    return {"commit": commit or described, "date": datetime.now(UTC).date().isoformat()}


def machine(device: str) -> dict[str, Any]:
    """The name of the GPU or CPU, and the versions of torch and Triton."""
    import torch

    gpu = torch.cuda.get_device_name() if device.startswith("cuda") else None
    return {
        "machine": gpu or platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "triton": metadata.version("triton"),
    }

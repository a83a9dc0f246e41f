"""Where and when a table was measured."""

import argparse
import platform
import subprocess
from datetime import UTC, datetime
from typing import Any


def provenance(command: str, args: argparse.Namespace) -> dict[str, Any]:
    """Command, commit, machine, software, date."""
    import torch

    cuda = args.device.startswith("cuda")
    machine = torch.cuda.get_device_name() if cuda else platform.processor()
    return {
        "command": command,
        "commit": args.commit or _commit(),
        "machine": machine or platform.machine(),
        "torch": torch.__version__,
        "date": datetime.now(UTC).date().isoformat(),
    }


def _commit() -> str:
    run = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return run.stdout.strip() or "unknown"

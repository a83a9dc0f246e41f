"""What the commands of this folder share: their options, where and when they ran, two files."""

import argparse
import json
import platform
import subprocess
from collections.abc import Callable
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any


def arguments(description: str | None) -> argparse.ArgumentParser:
    """A parser with the options that every command has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("out", type=Path, help="directory for the results")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--commit", help="git commit, where the sources came without .git")
    return parser


def save(
    out: Path, name: str, result: dict[str, Any], page: Callable[[dict[str, Any]], str]
) -> None:
    """Write `result` as NAME.json and what `page` makes of it as NAME.md, and print that."""
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    (out / f"{name}.md").write_text(page(result))
    print(page(result))


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
        "triton": metadata.version("triton"),
        "date": datetime.now(UTC).date().isoformat(),
    }


def compiler(result: dict[str, Any]) -> str:
    """What compiled the kernels of a result, as its page says it."""
    return f"torch {result['torch']}, triton {result['triton']}"


def _commit() -> str:
    run = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return run.stdout.strip() or "unknown"

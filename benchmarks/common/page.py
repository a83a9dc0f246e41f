"""The two files of a result, JSON and a Markdown page, and the provenance that both state."""

import argparse
import json
import platform
import shlex
import shutil
import subprocess
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

# What compiles and runs kernels, as results name it. Only a result of an engine names vLLM.
_SOFTWARE = ("vllm", "torch", "triton")


def documented(description: str | None) -> argparse.ArgumentParser:
    """A parser whose --help shows the docstring of a command as it is."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def arguments(description: str | None) -> argparse.ArgumentParser:
    """A parser with OUT, --device and --commit."""
    parser = documented(description)
    parser.add_argument("out", type=Path, help="directory for the results")
    parser.add_argument("--device", default="cpu")
    add_commit(parser)
    return parser


def add_commit(parser: argparse.ArgumentParser) -> None:
    """Add --commit, for machines that have the sources without .git."""
    parser.add_argument("--commit", help="git commit, where the sources came without .git")


def command_line(start: str, args: argparse.Namespace, usual: Mapping[str, Any]) -> str:
    """The command `start` with the options of `usual` whose values are other ones.

    What is not in `usual`, such as paths of this machine, is left out.
    """
    words = []
    for name, default in usual.items():
        if (given := getattr(args, name)) != default:
            values = given if isinstance(given, list) else [] if given is True else [given]
            words += [f"--{name.replace('_', '-')}", *map(str, values)]
    return " ".join([start, shlex.join(words)]).rstrip()


def provenance(command: str, device: str, commit: str | None = None) -> dict[str, Any]:
    """Command, commit, date, machine and software. Initializes CUDA if `device` is a GPU."""
    return {"command": command, **source(commit), **machine(device)}


def source(commit: str | None = None) -> dict[str, Any]:
    """The commit of the sources (git's, unless it is given) and today's date."""
    described = output_of("git", "describe", "--always", "--dirty", "--exclude=*")
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


def output_of(*command: str) -> str:
    """What a command prints; "unknown" if it is not installed or fails."""
    if shutil.which(command[0]) is None:
        return "unknown"
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else "unknown"


def origin(result: Mapping[str, Any]) -> str:
    """The provenance of a result as a page states it. Older results lack some of it."""
    parts = [result["machine"], result["date"]]
    parts += [f"{name} {result[name]}" for name in _SOFTWARE if name in result]
    parts += [f"commit {result['commit']}"] if "commit" in result else []
    return ", ".join([*parts, f"`{result['command']}`"])


def save(out: Path, result: Mapping[str, Any], page: str) -> None:
    """Write `result` to OUT.json and `page` to OUT.md, where `out` has no suffix."""
    out.parent.mkdir(parents=True, exist_ok=True)
    out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
    out.with_suffix(".md").write_text(page)

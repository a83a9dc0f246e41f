"""Starts the client as users do: locust in its own processes."""

import os
import subprocess
from pathlib import Path
from typing import Any

from loadtest.client.command import client_command
from loadtest.traffic.generate import generate
from loadtest.traffic.schedule import write_schedule
from tests.loadtest.runs import scenario

ROOT = Path(__file__).parents[2]
LOCUSTFILE = Path(__file__).with_name("patient_locustfile.py")
# Where it may be had, so that what else runs on the machine does not decide over the instrument.
PRIORITY = ["nice", "-n", "-15"] if os.geteuid() == 0 else []


def written_schedule(directory: Path, rate: float, duration: float, output: int) -> Path:
    lengths = {"input": 32, "output": output}
    path = directory / "schedule.jsonl"
    write_schedule(generate(scenario(lengths=lengths, rate=rate, duration=duration)), path)
    return path


def command(schedule: Path, server: str, out: Path, *more: str) -> list[str]:
    own = client_command(server, "mock", schedule, out, *more)
    own[own.index("-f") + 1] = str(LOCUSTFILE)
    return [*PRIORITY, *own]


def locust(*arguments: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )


def started(*arguments: Any) -> subprocess.Popen[str]:
    """The client while it runs; all that it prints is one stream."""
    into: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command(*arguments), cwd=ROOT, **into)

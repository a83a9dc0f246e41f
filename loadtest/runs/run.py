"""A run's directory: run.json, the schedule it replayed, records.N.jsonl, health.N.json.

Each client process writes its own two files, and the reader of the directory joins them. So a run
that was spread over several machines only needs its files copied into one directory. A step of a
staircase has earlier.jsonl, too.
"""

import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from loadtest.errors import LoadTestError, faults
from loadtest.runs.access import server_version
from loadtest.runs.health import ProcessHealth, read_health
from loadtest.runs.records import Record, read_records
from loadtest.runs.server_metrics import read_facts
from loadtest.runs.target import Target
from loadtest.runs.verdict import Verdict, judge
from loadtest.traffic.schedule import Schedule, fingerprint, read_schedule, traffic_file
from vllm_gac.checkpoint.atomic_files import write_json

EARLIER = "earlier.jsonl"


class _Info(BaseModel):
    """What a report needs of run.json, which has more."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)

    label: str
    start_at: float
    processes: Annotated[int, Field(ge=1)]
    schedule_sha256: str
    base_url: str = ""
    model: str = ""
    endpoint: str = ""
    command: str = ""
    versions: dict[str, str] = Field(default_factory=dict)
    hardware: dict[str, str] = Field(default_factory=dict)
    gpus: Annotated[int, Field(ge=1)] = 1
    start: str = ""  # names the start of the server that answered
    side_by_side: bool | None = None  # how `ab` ran the servers that it started
    window: Annotated[list[float], Field(min_length=2, max_length=2)] | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """One run. `info` is the content of run.json; `server` holds the facts of server_metrics.py.

    `earlier` are the records of requests that were due before the run and still under way when it
    began. They count for throughput alone.
    """

    directory: Path
    info: dict[str, Any]
    schedule: Schedule
    records: list[Record]
    processes: list[ProcessHealth]
    verdict: Verdict
    server: dict[str, float]
    earlier: list[Record] = field(default_factory=list)


def begin_run(
    directory: Path,
    schedule: Path,
    target: Target,
    label: str,
    processes: int,
    lead: float,
    start: str = "",
) -> float:
    """Create the directory, and write run.json and a copy of the schedule.

    Returns when the run is to start, in seconds since the epoch: `lead` seconds after everything is
    known, however long the server takes to tell its version.
    """
    directory.mkdir(parents=True, exist_ok=True)
    copy = directory / "schedule.jsonl"
    shutil.copyfile(schedule, copy)
    if (about := traffic_file(schedule)).exists():
        shutil.copyfile(about, traffic_file(copy))
    info: dict[str, Any] = {
        "label": label or f"{target.model} at {target.base_url.partition('//')[2]}",
        "command": shlex.join(sys.argv),
        "start": start,
        "processes": processes,
        "base_url": target.base_url,
        "model": target.model,
        "endpoint": target.endpoint,
        "schedule_sha256": fingerprint(copy),
        "server_version": server_version(target),
        "versions": _versions(),
        "hardware": _hardware(),
    }
    info["start_at"] = time.time() + lead
    write_json(directory / "run.json", info)
    return float(info["start_at"])


def load_run(directory: Path) -> Run:
    """Read a run's directory and judge the run. Raises LoadTestError if the files do not fit."""
    info = read_info(directory)
    schedule = read_schedule(directory / "schedule.jsonl")
    records = read_records(sorted(directory.glob("records.*.jsonl")))
    if not all(_belongs(record, schedule) for record in records):
        raise LoadTestError(f"{directory}: records of another schedule")
    processes = [read_health(path) for path in sorted(directory.glob("health.*.json"))]
    verdict = judge(records, processes, len(schedule.requests), info["processes"])
    server, earlier = read_facts(directory), read_records(sorted(directory.glob(EARLIER)))
    return Run(directory, info, schedule, records, processes, verdict, server, earlier)


def read_info(directory: Path) -> dict[str, Any]:
    """The content of a run's run.json. Raises LoadTestError if it is none."""
    path = directory / "run.json"
    try:
        return _Info.model_validate_json(path.read_bytes()).model_dump(exclude_none=True)
    except OSError as error:
        raise LoadTestError(
            f"{directory}: not the directory of a run: {path.name}: {error.strerror or error}"
        ) from error
    except ValidationError as error:
        raise LoadTestError(
            f"{directory}: not the directory of a run: {path.name}: {'; '.join(faults(error))}"
        ) from error


def _belongs(record: Record, schedule: Schedule) -> bool:
    if not 0 <= record.index < len(schedule.requests):
        return False
    request, due = schedule.requests[record.index], record.scheduled
    if request.session_id is None:
        return due == request.timestamp / 1000
    return due >= request.timestamp / 1000 - 1e-6  # records are rounded to microseconds


def _versions() -> dict[str, str]:
    """The versions of the relevant packages that are installed."""
    versions = {"python": platform.python_version(), "kernel": platform.release()}
    for name in ("vllm-gac", "vllm", "torch", "locust", "gevent", "numpy", "matplotlib"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _hardware() -> dict[str, str]:
    """The CPU, memory and GPUs of this machine, in words."""
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": f"{_cpu_model()}, {os.cpu_count()} logical cores",
        "memory": f"{pages / 2**30:.0f} GiB",
        "gpu": "; ".join(gpus()) or "none",
    }


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


@cache
def gpus() -> list[str]:
    """The GPUs of this machine, by nvidia-smi; none where it is not there."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return answer.stdout.strip().splitlines()

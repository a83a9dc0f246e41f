"""The environment of a measurement: the client's versions and hardware."""

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path


def versions() -> dict[str, str]:
    """The versions of the relevant packages that are installed."""
    found = {"python": platform.python_version(), "kernel": platform.release()}
    for name in ("vllm-gac", "vllm", "torch", "locust", "gevent", "numpy", "matplotlib"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def hardware() -> dict[str, str]:
    """The CPU, memory and GPUs of this machine, in words."""
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": f"{_cpu_model()}, {os.cpu_count()} logical cores",
        "memory": f"{pages / 2**30:.0f} GiB",
        "gpu": _gpus(),
    }


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _gpus() -> str:
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return "none"
    return "; ".join(answer.stdout.strip().splitlines()) or "none"

"""A real `serve run FILE` for a test to talk to, in a Ray of its own that ends with it."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.request
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml
from openai import OpenAI

from tests.support.local_servers import free_port
from tests.support.waiting import PATIENCE, wait_until

START_SECONDS = 900

ENVIRONMENT = os.environ | {
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(Path(__file__).parents[2]),
    "RAY_COLOR_PREFIX": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # of 15 by default: starved where something else runs
}

# `serve run FILE`, and again for each file named on standard input, with a Ray that fits a small
# machine, whatever else of Ray runs there. SIGTERM does here what Ctrl-C does: a process that was
# started in the background may ignore SIGINT.
DRIVER = """
import signal, sys
import ray
from ray import serve
from ray.serve.scripts import cli

ray.init(
    "local", num_cpus=4, include_dashboard=False, object_store_memory=100 << 20,
    namespace="serve", _temp_dir=sys.argv[1],
)
signal.signal(signal.SIGTERM, signal.default_int_handler)  # over Ray's
try:
    for file in sys.stdin:
        cli(["run", "--non-blocking", file.strip()], standalone_mode=False)
except KeyboardInterrupt:
    serve.shutdown()
"""


@dataclass(frozen=True)
class App:
    """A running application: where it is, its files, its driver."""

    url: str
    directory: Path
    driver: psutil.Popen

    @property
    def log(self) -> Path:
        """What Ray, the replicas and vLLM said."""
        return self.directory / "log"

    def client(self) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE)

    def metric(self, name: str) -> dict[str, float]:
        """The metric of each replica, summed over other labels."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=PATIENCE) as response:
            text = response.read().decode()
        by_labels: dict[str, float] = {}
        for replica, value in re.findall(rf'^{name}{{replica="(\w+)".*}} (\S+)$', text, re.M):
            by_labels[replica] = by_labels.get(replica, 0.0) + float(value)
        return by_labels

    def processes(self) -> list[psutil.Process]:
        """Ray's, the replicas' and vLLM's."""
        return self.driver.children(recursive=True)

    def replicas(self) -> list[psutil.Process]:
        return [p for p in self.processes() if _title(p).startswith("ray::ServeReplica")]


def api_server(replica: psutil.Process) -> psutil.Process:
    """The `vllm serve` of a replica."""
    return _child(replica, "--uds")


def engine_core(replica: psutil.Process) -> psutil.Process:
    return _child(api_server(replica), "EngineCore")


def _child(parent: psutil.Process, title: str) -> psutil.Process:
    # A list of processes is no snapshot, and on a busy machine children come late.
    children: list[psutil.Process] = []

    def is_there() -> bool:
        children[:] = [child for child in parent.children() if title in _title(child)]
        return bool(children)

    wait_until(is_there, PATIENCE, f"{parent} has a child {title}")
    return children[0]


def _title(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


@contextlib.contextmanager
def serve_run(config: dict[str, Any], directory: Path) -> Iterator[App]:
    """Have a Serve config run on a free port, and end with every process of it."""
    port = free_port()
    # Not pytest's: a path of a socket has at most 107 characters, of which Ray takes 60.
    ray_directory = tempfile.mkdtemp(prefix="ray-")
    with (directory / "log").open("w") as out:
        driver = psutil.Popen(
            [sys.executable, "-c", DRIVER, ray_directory],
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=out,
            env=ENVIRONMENT,
            start_new_session=True,
        )
    app = App(f"http://127.0.0.1:{port}", directory, driver)
    try:
        deploy(app, {**config, "http_options": {"host": "127.0.0.1", "port": port}})
        yield app
    finally:
        stop(app)
        shutil.rmtree(ray_directory, ignore_errors=True)


def deploy(app: App, config: dict[str, Any]) -> None:
    """Have it run this instead of what it runs; returns before it does."""
    file = app.directory / f"{uuid.uuid4()}.yaml"
    file.write_text(yaml.safe_dump(config))
    app.driver.stdin.write(f"{file}\n".encode())
    app.driver.stdin.flush()


def stop(app: App) -> list[psutil.Process]:
    """Ctrl-C; what still runs after it is killed, and returned."""
    processes = []
    with contextlib.suppress(psutil.NoSuchProcess):
        processes = app.processes()
        app.driver.send_signal(signal.SIGTERM)
    _, left = psutil.wait_procs([app.driver, *processes], timeout=PATIENCE)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, timeout=PATIENCE)
    return left

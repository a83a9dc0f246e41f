"""A replica of a small model under Ray Serve, really started: answers, a death, the end.

In a Ray of its own that ends with it. The tests run in order, on one application.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
import yaml

from tests.serving.models import HETEROGENEOUS, write_model
from tests.support.local_servers import free_port
from tests.support.waiting import PATIENCE, wait_until, wait_until_gone

pytestmark = [pytest.mark.slow, pytest.mark.needs("ray")]

START_SECONDS = 900
MODEL = "m"
RUNNING, FINISHED = "vllm:num_requests_running", "vllm:request_success_total"
LOST = openai.APIError, httpx.HTTPError  # before the answer, and in it
FLAGS = (
    f"--load-format gac --served-model-name {MODEL} --enforce-eager --max-model-len 8192 "
    "--max-num-seqs 8 --kv-cache-memory-bytes 100M --shutdown-timeout 300"
)
ENVIRONMENT = os.environ | {
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(Path(__file__).parents[2]),
    "RAY_COLOR_PREFIX": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # of 15 by default: starved where something else runs
}

# `serve run FILE` until it is told to end, with a Ray that fits a small machine, whatever else of
# Ray runs there. SIGTERM does here what Ctrl-C does: a process that was started in the background
# may ignore SIGINT.
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
    cli(["run", "--non-blocking", sys.argv[2]], standalone_mode=False)
    signal.pause()
except KeyboardInterrupt:
    serve.shutdown()
"""


@dataclass(frozen=True)
class App:
    """A running application: where it is, and its driver."""

    url: str
    driver: psutil.Popen

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE
        )

    def metric(self, name: str) -> dict[str, float]:
        """The metric of each replica, summed over other labels."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=PATIENCE) as response:
            text = response.read().decode()
        by_labels: dict[str, float] = {}
        for replica, value in re.findall(rf'^{name}{{replica="(\w+)".*}} (\S+)$', text, re.M):
            by_labels[replica] = by_labels.get(replica, 0.0) + float(value)
        return by_labels

    def processes(self, title: str = "") -> list[psutil.Process]:
        """Those of Ray, the replica and vLLM that have this in their title."""
        return [p for p in self.driver.children(recursive=True) if title in _title(p)]

    def stop(self) -> list[psutil.Process]:
        """Ctrl-C; what still runs after it is killed, and returned."""
        processes = []
        with contextlib.suppress(psutil.NoSuchProcess):
            processes = self.processes()
            self.driver.send_signal(signal.SIGTERM)
        _, left = psutil.wait_procs([self.driver, *processes], timeout=PATIENCE)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=PATIENCE)
        return left


def _title(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    root, port = tmp_path_factory.mktemp("ray"), free_port()
    write_model(root / "model", HETEROGENEOUS[:2], max_position_embeddings=8192)
    application = {
        "name": "test",
        "import_path": "serving_configs.ray.app:application",
        "args": {"model": str(root / "model"), "flags": FLAGS},
        "deployments": [{"name": "Replica", "num_replicas": 1, "health_check_period_s": 1}],
    }
    config = {
        "applications": [application],
        "http_options": {"host": "127.0.0.1", "port": port},
    }
    (root / "config.yaml").write_text(yaml.safe_dump(config))
    # Not pytest's: a path of a socket has at most 107 characters, of which Ray takes 60.
    ray_directory = tempfile.mkdtemp(prefix="ray-")
    with (root / "log").open("w") as out:
        driver = psutil.Popen(
            [sys.executable, "-c", DRIVER, ray_directory, str(root / "config.yaml")],
            stdout=out,
            stderr=subprocess.STDOUT,
            env=ENVIRONMENT,
            start_new_session=True,
        )
    running = App(f"http://127.0.0.1:{port}", driver)
    try:
        wait_until(lambda: running.metric(RUNNING), START_SECONDS, "a replica")
        yield running
    except TimeoutError:
        pytest.fail((root / "log").read_text()[-6000:])
    finally:
        running.stop()
        shutil.rmtree(ray_directory, ignore_errors=True)


def complete(app: App, prompt: list[int], tokens: int, stream: bool) -> str:
    """A greedy answer; raises when it is none, or ends before its end."""
    options: Any = {"ignore_eos": True}
    arguments: Any = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    if not stream:
        answer = app.client().completions.create(**arguments, extra_body=options)
        return answer.choices[0].text
    parts = list(app.client().completions.create(**arguments, extra_body=options, stream=True))
    assert parts[-1].choices[0].finish_reason == "length", "the stream ended before the answer did"
    return "".join(part.choices[0].text for part in parts)


def outcome(app: App, number: int, tokens: int) -> Exception | None:
    """Why the client of this number has no answer, or None; every other one streams."""
    try:
        complete(app, [9, number], tokens, stream=number % 2 == 0)
    except LOST as error:
        return error
    return None


def test_concurrent_requests_are_answered(app: App) -> None:
    before = sum(app.metric(FINISHED).values())
    expected = complete(app, [7, 300, 11], 24, stream=False)
    with ThreadPoolExecutor(12) as pool:
        answers = list(
            pool.map(lambda n: complete(app, [7, 300, 11], 24, stream=n % 2 == 0), range(24))
        )
    # Batches of different make-up round differently, so greedy answers may part ways.
    assert answers.count(expected) >= 12, (expected, answers)
    assert sum(app.metric(FINISHED).values()) == before + 25


def test_killed_engine_fails_its_requests_and_is_replaced(app: App) -> None:
    (old,) = app.metric(RUNNING)
    (replica,) = app.processes("ray::ServeReplica")
    group = [replica, *replica.children(recursive=True)]
    with ThreadPoolExecutor(8) as pool:
        # So long that none has its end before the engine has.
        flights = [pool.submit(outcome, app, n, 6000) for n in range(8)]
        # One that has no replica yet would wait for the next.
        wait_until(lambda: app.metric(RUNNING)[old] == 8, PATIENCE, "all requests run")
        (core,) = [process for process in group if "EngineCore" in _title(process)]
        core.kill()
        assert all(flight.result(PATIENCE) for flight in flights)  # none hangs
    wait_until_gone(group)  # nothing of it stays
    wait_until(lambda: set(app.metric(RUNNING)) - {old}, START_SECONDS, "a new replica")
    assert complete(app, [5, 6], 8, stream=True)


def test_shutdown_leaves_no_process_and_no_pending_request(app: App) -> None:
    processes = app.processes()
    with ThreadPoolExecutor(8) as pool:
        flights = [pool.submit(outcome, app, n, 600) for n in range(8)]
        wait_until(lambda: sum(app.metric(RUNNING).values()) > 4, PATIENCE, "requests run")
        assert app.stop() == []
        for flight in flights:
            flight.result(PATIENCE)  # an answer or an error of a client
    assert not any(process.is_running() for process in processes)

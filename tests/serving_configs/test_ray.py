"""Ray's own LLM application serves a small model, really started: answers, a death, the end.

In a Ray of its own that ends with it. The tests run in order, on one application.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import httpx
import openai
import psutil
import pytest
import yaml

from tests.serving.models import HETEROGENEOUS, write_model
from tests.serving_configs.programs import CONFIGS
from tests.support.local_servers import free_port
from tests.support.waiting import PATIENCE, wait_until, wait_until_gone

pytestmark = [pytest.mark.slow, pytest.mark.needs("ray")]

START_SECONDS = 900
LOST = openai.APIError, httpx.HTTPError  # before the answer, and in it
ENVIRONMENT = os.environ | {
    "OMP_NUM_THREADS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # of 15 by default: starved where something else runs
}

# `serve run FILE` until it is told to end, with a Ray that fits a small machine, whatever else of
# Ray runs there.
DRIVER = """
import signal, sys
import ray
from ray import serve
from ray.serve.scripts import cli

ray.init(
    "local", num_cpus=2, include_dashboard=False, object_store_memory=100 << 20,
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

    def complete(self, prompt: list[int], tokens: int, stream: bool = False) -> str:
        """A greedy answer; raises when it is none, or ends before its end."""
        with openai.OpenAI(
            base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=PATIENCE
        ) as client:
            answer = client.completions.create(
                model="demo",
                prompt=prompt,
                max_tokens=tokens,
                temperature=0,
                stream=stream,
                extra_body={"ignore_eos": True},
            )
            if isinstance(answer, openai.Stream):
                parts = list(answer)
                assert parts[-1].choices[0].finish_reason == "length", "it ended before its end"
                return "".join(part.choices[0].text for part in parts)
            return answer.choices[0].text

    def answers(self) -> bool:
        with contextlib.suppress(*LOST):
            return bool(self.complete([5, 6], 1))
        return False

    def stop(self) -> list[psutil.Process]:
        """Ctrl-C; what still runs after it is killed, and returned."""
        processes = []
        with contextlib.suppress(psutil.NoSuchProcess):
            processes = self.driver.children(recursive=True)
            self.driver.send_signal(signal.SIGTERM)
        _, left = psutil.wait_procs([self.driver, *processes], timeout=PATIENCE)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=PATIENCE)
        return left


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    """The committed file of the demo, of another model at another port."""
    root, port = tmp_path_factory.mktemp("ray"), free_port()
    write_model(root / "model", HETEROGENEOUS[:2], max_position_embeddings=8192)
    config = yaml.safe_load((CONFIGS / "ray" / "cpu-demo.yaml").read_text())
    config["http_options"]["port"] = port
    (model,) = config["applications"][0]["args"]["llm_configs"]
    model["model_loading_config"]["model_source"] = str(root / "model")
    model["deployment_config"]["health_check_period_s"] = 1
    model["engine_kwargs"] |= {"max_model_len": 8192, "kv_cache_memory_bytes": 10**8}
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
        wait_until(running.answers, START_SECONDS, "a replica")
        yield running
    except TimeoutError:
        pytest.fail((root / "log").read_text()[-6000:])
    finally:
        running.stop()
        shutil.rmtree(ray_directory, ignore_errors=True)


def test_concurrent_requests_are_answered(app: App) -> None:
    expected = app.complete([7, 300, 11], 24)
    with ThreadPoolExecutor(12) as pool:
        answers = list(
            pool.map(lambda n: app.complete([7, 300, 11], 24, stream=n % 2 == 0), range(24))
        )
    # Batches of different make-up round differently, so greedy answers may part ways.
    assert answers.count(expected) >= 12, (expected, answers)


def test_killed_engine_fails_its_requests_and_is_replaced(app: App) -> None:
    (core,) = [p for p in app.driver.children(recursive=True) if "EngineCore" in _title(p)]
    with ThreadPoolExecutor(4) as pool:
        flights = [pool.submit(app.complete, [9, n], 6000, stream=n % 2 == 0) for n in range(4)]
        core.kill()
        assert all(isinstance(flight.exception(PATIENCE), LOST) for flight in flights)
    wait_until_gone([core])
    wait_until(app.answers, START_SECONDS, "a new replica")


def test_shutdown_leaves_no_process(app: App) -> None:
    assert app.stop() == []


def _title(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""

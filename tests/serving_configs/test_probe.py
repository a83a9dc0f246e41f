"""The real blackbox exporter, with the committed file, before servers that stand in for vLLM."""

import contextlib
import re
import socket
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator

import pytest
import yaml

from tests.serving_configs.debian import CONFIGS, program
from tests.serving_configs.front import upstream
from tests.support.local_servers import free_port
from tests.support.waiting import PATIENCE, wait_until

FILE = CONFIGS / "prometheus" / "blackbox.yml"


@pytest.fixture(scope="module")
def exporter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory = tmp_path_factory.mktemp("blackbox")
    (directory / "key").write_text("correct horse\n")
    config = directory / "blackbox.yml"
    config.write_text(FILE.read_text().replace("/run/secrets/vllm_key", str(directory / "key")))
    url = f"127.0.0.1:{free_port()}"
    exporter = program("prometheus-blackbox-exporter")
    command = [exporter, f"--config.file={config}", f"--web.listen-address={url}"]
    with (directory / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        wait_until(lambda: process.poll() is not None or _listens(url), PATIENCE, "it listens")
        assert process.poll() is None, (directory / "log").read_text()
        yield f"http://{url}"
    finally:
        process.terminate()
        process.wait(PATIENCE)


def _listens(url: str) -> bool:
    urllib.request.urlopen(f"http://{url}/-/healthy", timeout=PATIENCE).close()
    return True


def succeeds(exporter: str, port: int, path: str = "completions", within: float = PATIENCE) -> bool:
    """Whether the request is answered in time, as Prometheus hears."""
    target = f"http://127.0.0.1:{port}/v1/{path}"
    query = urllib.parse.urlencode({"module": "completion", "target": target})
    timeout = {"X-Prometheus-Scrape-Timeout-Seconds": str(within)}
    request = urllib.request.Request(f"{exporter}/probe?{query}", headers=timeout)
    with urllib.request.urlopen(request, timeout=2 * PATIENCE) as response:
        (success,) = re.findall(r"^probe_success (\d)$", response.read().decode(), re.M)
    return bool(int(success))


def test_a_server_that_answers_has_had_the_request_and_the_key(exporter: str) -> None:
    with upstream() as seen:
        assert succeeds(exporter, seen.port)
        assert not succeeds(exporter, seen.port, "refused")  # 429, as a wrong key has 401
    path, headers, body = seen.requests[0]
    assert path == "/v1/completions"
    assert headers["Authorization"] == "Bearer correct horse"
    assert yaml.safe_load(body) == {"prompt": "x", "max_tokens": 1}


def test_a_server_that_hangs_is_noticed(exporter: str) -> None:
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as hangs:
        assert not succeeds(exporter, hangs.getsockname()[1], within=1)  # the connection is taken

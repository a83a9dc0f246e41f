"""A server is measured only after it is healthy, and it never outlives its measurement."""

import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from loadtest.ab.server import running_server
from loadtest.errors import LoadTestError
from tests.support.local_servers import free_port
from tests.support.waiting import PATIENCE, wait_until, wait_until_gone

ROOT = Path(__file__).parents[2]


def test_a_server_listens_inside_the_block_and_not_after_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A proxy is not asked about it.
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    port = free_port()
    command = [sys.executable, "-m", "loadtest", "mock", "--port", str(port)]
    environment = {"PYTHONPATH": str(ROOT)}
    url = f"http://127.0.0.1:{port}"

    def measure() -> None:
        with running_server(command, environment, url, tmp_path / "log", PATIENCE):
            socket.create_connection(("127.0.0.1", port), 1).close()
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        measure()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), 1)


@pytest.mark.parametrize(
    ("command", "patience", "message"),
    [
        (
            ["sh", "-c", "echo no such model; exit 7"],
            PATIENCE,
            "exited with 7; the end of its log is above",
        ),
        (["sleep", "600"], 0.5, "did not get healthy in 0.5 s"),
        (["/no/such/program"], PATIENCE, "exited with 127; the end of its log is above"),
    ],
)
def test_a_server_that_does_not_come_up_is_an_error(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    command: list[str],
    patience: float,
    message: str,
) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    log = tmp_path / "log"
    with (
        pytest.raises(LoadTestError, match=message),
        running_server(command, {}, url, log, patience),
    ):
        pass
    said = capsys.readouterr().err
    if "exited" in message:
        assert "no such model" in said or "cannot start /no/such/program: No such file" in said


def test_a_foreign_server_on_the_port_is_refused(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as foreign:
        url = f"http://127.0.0.1:{foreign.getsockname()[1]}"
        with (
            pytest.raises(LoadTestError, match=url),
            running_server(["sleep", "600"], {}, url, tmp_path / "log", PATIENCE),
        ):
            pass


def test_nothing_outlives_a_measurement_that_is_killed(tmp_path: Path) -> None:
    # One child of the command has left its session, as the daemons of Ray do.
    server = f"setsid sleep 600 & echo $! >{tmp_path}/detached; echo $$ >{tmp_path}/own; sleep 600"
    measurement = (
        "import sys, time; from loadtest.ab.keeper import kept\n"
        f"with kept(['sh', '-c', {server!r}], sys.stderr.buffer): time.sleep(600)"
    )
    killed = subprocess.Popen([sys.executable, "-c", measurement], cwd=ROOT)
    started = [tmp_path / "detached", tmp_path / "own"]
    wait_until(lambda: all(path.read_text() for path in started), PATIENCE, "both run")
    left = [psutil.Process(int(path.read_text())) for path in started]
    killed.kill()
    killed.wait()
    wait_until_gone(left)

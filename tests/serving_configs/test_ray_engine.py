"""The process of a replica: started, heard, stopped, and gone whatever way the replica ends.

A stand-in for `vllm`, found before the real one, takes its command line: it serves /health, and has
a child, as vLLM has its engine core.
"""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

pytest.importorskip("aiohttp")

from serving_configs.ray.engine import Engine, EngineStartError
from serving_configs.ray.forward import session
from tests.support.waiting import PATIENCE, wait_until, wait_until_gone

VLLM = """
import http.server, signal, socketserver, subprocess, sys

def main():
    model, flags = sys.argv[2], sys.argv[3:]
    print("about", sys.argv[0], sys.argv[1], model)
    if model == "unknown":
        print("Traceback (most recent call last):")
        print("(EngineCore pid=1) ERROR 11-21 22:00:00 [core.py:1] "
              "vllm_gac.errors.CheckpointError: /m/config.json: no such file")
        print("RuntimeError: Engine core initialization failed. See root cause above. Failed: {}")
        sys.exit(1)
    if model == "wrong":
        print("usage: vllm serve [model_tag] [options]")
        print("vllm serve: error: unrecognized arguments: --none")
        sys.exit(2)
    if model == "invalid":
        print("pydantic_core.ValidationError: 1 validation error for ModelConfig")
        print("  Value error, no model of this name [type=value_error, input_value=...]")
        print("    For further information visit https://errors.pydantic.dev/2/v/value_error")
        sys.exit(1)
    if "--deaf" in flags:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    subprocess.Popen(["sleep", "600"])

    class Health(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def address_string(self):
            return ""

    socketserver.UnixStreamServer(flags[flags.index("--uds") + 1], Health).serve_forever()
"""


@pytest.fixture(autouse=True)
def _stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "vllm" / "entrypoints" / "cli"
    package.mkdir(parents=True)
    for directory in (package, *package.parents[:2]):
        (directory / "__init__.py").touch()
    (package / "main.py").write_text(VLLM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


async def started(model: str = "m", *flags: str) -> Engine:
    engine = Engine(model, list(flags))
    async with session(engine.socket) as vllm:
        await engine.wait_until_healthy(vllm)
    return engine


def processes(engine: Engine) -> list[psutil.Process]:
    server = psutil.Process(engine._process.pid)
    return [server, *server.children(recursive=True)]


def test_engine_runs_and_its_output_is_forwarded_until_stopped(
    capfd: pytest.CaptureFixture[str],
) -> None:
    engine = asyncio.run(started())
    group = processes(engine)
    assert len(group) == 2
    assert engine.running()
    engine.stop()
    assert not engine.running()
    wait_until_gone(group)
    assert not Path(engine.socket).parent.exists()
    assert "about vllm serve m" in capfd.readouterr().err
    engine.stop()  # again: nothing happens


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        ("unknown", "vllm serve ended with exit code 1: /m/config.json: no such file"),
        ("wrong", "vllm serve ended with exit code 2: unrecognized arguments: --none"),
        ("invalid", "vllm serve ended with exit code 1: no model of this name"),
    ],
)
def test_failed_start_reports_its_cause(model: str, sentence: str) -> None:
    with pytest.raises(EngineStartError) as error:
        asyncio.run(started(model))
    assert str(error.value) == sentence


def test_engine_core_stops_when_the_api_server_is_killed() -> None:
    engine = asyncio.run(started())
    group = processes(engine)
    group[0].kill()
    wait_until(lambda: not engine.running(), PATIENCE, "its end is seen")
    engine.stop()
    wait_until_gone(group)


def test_engine_that_ignores_sigterm_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serving_configs.ray.engine.STOP_SECONDS", 0.3)
    engine = asyncio.run(started("m", "--deaf"))
    group = processes(engine)
    engine.stop()
    wait_until_gone(group)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_engine_stops_when_its_replica_is_killed(tmp_path: Path, how: signal.Signals) -> None:
    replica = textwrap.dedent(
        """
        import sys, time
        from serving_configs.ray.engine import Engine
        engine = Engine("m", [])
        print(engine._process.pid, engine.socket, flush=True)
        time.sleep(600)
        """
    )
    environment = os.environ | {"PYTHONPATH": f"{Path(__file__).parents[2]}:{tmp_path}"}
    command = [sys.executable, "-c", replica]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid, socket = process.stdout.readline().split()
        server = psutil.Process(int(pid))
        process.send_signal(how)
    wait_until_gone([server])
    assert not Path(socket).parent.exists()

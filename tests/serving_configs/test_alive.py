"""The liveness probe ends a server that hangs, and no server that is busy."""

import contextlib
import http.server
import itertools
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from serving_configs.vllm.alive import computes
from tests.support.local_servers import answering
from tests.support.waiting import PATIENCE

TOKENS, CACHE = "vllm:generation_tokens_total", "vllm:kv_cache_usage_perc"


@contextlib.contextmanager
def server(status: int, others: str) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """A stand-in for vLLM: its address, and the requests that it was sent.

    Args:
        status: of an answer; 0: it hangs.
        others: what grows meanwhile, of other requests.
    """
    asked: list[dict[str, Any]] = []
    work, ended = itertools.count(), threading.Event()

    class StandIn(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert self.path == "/metrics"
            signs = dict.fromkeys((TOKENS, CACHE), 7) | ({others: next(work)} if others else {})
            lines = [f'{name}{{engine="0"}} {value}\n' for name, value in signs.items()]
            self._reply(200, "".join(lines) + "up 1\n")

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            asked.append(json.loads(body) | {"key": self.headers["Authorization"]})
            if status == 0:
                ended.wait(PATIENCE)
            else:
                self._reply(status, "{}")

        def _reply(self, status: int, text: str) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    with answering(http.server.ThreadingHTTPServer(("127.0.0.1", 0), StandIn)) as address:
        try:
            yield f"http://{address}", asked
        finally:
            ended.set()


@pytest.mark.parametrize(
    ("status", "others", "alive"),
    [
        pytest.param(0, "", False, id="hangs while nobody else asks"),
        pytest.param(0, TOKENS, True, id="busy, so that the probe waits"),
        pytest.param(0, CACHE, True, id="reads a long prompt"),
        pytest.param(503, "", False, id="queue full of requests that hang"),
        pytest.param(503, TOKENS, True, id="queue full of requests that run"),
        pytest.param(401, "", True, id="wrong key"),
    ],
)
def test_a_server_lives_while_its_engine_works(status: int, others: str, alive: bool) -> None:
    with server(status, others) as (base, _):
        assert computes(base, 1) is alive


def test_an_idle_server_is_asked_for_one_token_with_the_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "correct horse")
    with server(200, others="") as (base, asked):
        assert computes(base, PATIENCE)
    assert asked == [{"prompt": "x", "max_tokens": 1, "key": "Bearer correct horse"}]


def test_a_server_that_is_gone_does_not_live() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    assert not computes(f"http://127.0.0.1:{port}", 1)

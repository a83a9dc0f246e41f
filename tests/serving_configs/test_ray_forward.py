"""What a replica passes between client and vLLM, against a stand-in that listens where vLLM would.

The client speaks with uvicorn, as Serve's proxy is one; in between there is no Ray.
"""

import asyncio
import contextlib
import http.client
import json
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp")
pytest.importorskip("uvicorn")

import uvicorn
from aiohttp import web
from fastapi import FastAPI, Request, Response

from serving_configs.ray.forward import METHODS, forward, session
from tests.support.local_servers import free_port
from tests.support.waiting import PATIENCE, wait_until


@dataclass
class Vllm:
    """The stand-in: what it was asked, and whether somebody left."""

    requests: list[tuple[str, str, dict[str, str], bytes]] = field(default_factory=list)
    left: threading.Event = field(default_factory=threading.Event)
    go_on: threading.Event = field(default_factory=threading.Event)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(
            (request.method, request.raw_path, dict(request.headers), await request.read())
        )
        if request.path == "/stream":
            return await self._stream(request)
        if request.path == "/dies":
            assert request.transport is not None
            request.transport.abort()
        if request.path == "/moved":
            return web.Response(status=307, headers={"Location": "/elsewhere"})
        return web.Response(
            status=418,
            body=b"\x1f\x8b no gzip",
            headers={"X-Kept": "1", "Content-Encoding": "gzip", "Content-Type": "application/x"},
        )

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        response.headers.add("Set-Cookie", "a=1")
        response.headers.add("Set-Cookie", "b=2")
        await response.prepare(request)
        try:
            await response.write(b"data: 1\n\n")
            while not self.go_on.is_set():
                await asyncio.sleep(0.01)
            if request.query.get("then") == "die":
                assert request.transport is not None
                request.transport.abort()
            await response.write(b"data: 2\n\n")
        except (ConnectionError, asyncio.CancelledError):
            self.left.set()
            raise
        return response


@dataclass(frozen=True)
class Place:
    port: int
    vllm: Vllm

    @contextlib.contextmanager
    def ask(
        self, path: str, method: str = "GET", body: bytes | None = None, **headers: str
    ) -> Iterator[http.client.HTTPResponse]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        connection.request(method, path, body, headers)
        try:
            yield connection.getresponse()
        finally:
            connection.close()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    vllm = Vllm()
    made = Place(free_port(), vllm)
    socket = str(tmp_path / "http")

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        upstream = web.Application()
        upstream.router.add_route("*", "/{path:.*}", vllm.answer)
        # vLLM's server notices that a client left; aiohttp's has to be told to.
        runner = web.AppRunner(upstream, handler_cancellation=True)
        await runner.setup()
        await web.UnixSite(runner, socket).start()
        async with session(socket) as app.state.vllm:
            yield
        await runner.cleanup()

    app = FastAPI(openapi_url=None, lifespan=lifespan)

    @app.api_route("/{path:path}", methods=METHODS)
    async def rest(request: Request) -> Response:
        return await forward(request, app.state.vllm)

    # As Serve does for an application with a route_prefix: the path that the app sees has it.
    config = uvicorn.Config(app, port=made.port, log_level="critical", root_path="/prefix")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_until(lambda: server.started, PATIENCE, "the replica listens")
    yield made
    server.should_exit = True
    vllm.go_on.set()
    thread.join(PATIENCE)


def test_requests_are_forwarded_unchanged(place: Place) -> None:
    body = json.dumps({"prompt": "é"}).encode()
    headers = {"Authorization": "Bearer key", "Content-Type": "application/json"}
    with place.ask("/v1/a%20b?x=%2F&y=1", "POST", body, **headers):
        pass
    ((method, path, seen, received),) = place.vllm.requests
    assert (method, path, received) == ("POST", "/v1/a%20b?x=%2F&y=1", body)
    assert headers.items() <= seen.items()
    assert "User-Agent" not in seen  # nothing is added


def test_responses_are_forwarded_unchanged(place: Place) -> None:
    with place.ask("/v1/none") as answer:
        assert answer.status == 418
        assert answer.headers["X-Kept"] == "1"
        assert answer.headers["Content-Encoding"] == "gzip"
        assert answer.headers.get_all("Server") == ["uvicorn"]
        assert len(answer.headers.get_all("Date") or []) == 1
        assert answer.read() == b"\x1f\x8b no gzip"


def test_every_method_is_forwarded(place: Place) -> None:
    for method in METHODS:
        with place.ask("/x", method) as answer:
            assert answer.status == 418
    assert [request[0] for request in place.vllm.requests] == METHODS


def test_redirects_are_not_followed(place: Place) -> None:
    with place.ask("/moved") as answer:
        assert (answer.status, answer.headers["Location"]) == (307, "/elsewhere")


def test_stream_chunks_are_forwarded_immediately(place: Place) -> None:
    with place.ask("/stream") as answer:
        assert answer.headers.get_all("Set-Cookie") == ["a=1", "b=2"]
        assert answer.readline() == b"data: 1\n"
        place.vllm.go_on.set()
        assert answer.read() == b"\ndata: 2\n\n"


def test_client_disconnect_is_forwarded(place: Place) -> None:
    with place.ask("/stream") as answer:
        answer.readline()
    assert place.vllm.left.wait(PATIENCE)


def test_engine_death_before_the_response_gives_503(place: Place) -> None:
    with place.ask("/dies") as answer:
        error: dict[str, Any] = json.loads(answer.read())["error"]
        assert (answer.status, error["code"]) == (503, 503)
        assert "try again" in error["message"]


def test_engine_death_during_a_stream_aborts_it(place: Place) -> None:
    with place.ask("/stream?then=die") as answer:
        answer.readline()
        place.vllm.go_on.set()
        with pytest.raises(http.client.IncompleteRead):
            answer.read()

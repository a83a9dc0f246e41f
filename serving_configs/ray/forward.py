"""Passing a request on to vLLM, and its answer back, unchanged but for what is of a connection."""

from collections.abc import AsyncIterator
from urllib.parse import quote

from aiohttp import (
    ClientConnectionError,
    ClientResponse,
    ClientSession,
    ClientTimeout,
    TCPConnector,
    UnixConnector,
)
from fastapi import Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from yarl import URL

METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"]
# Of one connection, not of what is passed on over it (RFC 9110, 7.6.1).
HOP_BY_HOP = {"connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"}
REWRITTEN = {"server", "date"}  # Serve's proxy writes its own


def session(socket: str | None = None) -> ClientSession:
    """Connections to the vLLM that listens on the Unix socket, or to addresses; any number."""
    return ClientSession(
        "http://vllm" if socket else None,
        connector=UnixConnector(socket, limit=0) if socket else TCPConnector(limit=0),
        timeout=ClientTimeout(total=None),
        auto_decompress=False,
        skip_auto_headers=["Accept", "Accept-Encoding", "Content-Type", "User-Agent"],
    )


async def forward(request: Request, vllm: ClientSession) -> Response:
    """vLLM's answer, each part as soon as it is there.

    When the client leaves, Serve cancels this or the answer's parts: the connection to vLLM is
    closed, and vLLM aborts the request. When vLLM dies before it answered, the answer is 503; after
    it began to, an exception breaks the stream off.
    """
    try:
        return passed_on(await send(request, vllm, "http://vllm"))
    except ClientConnectionError:
        return unavailable("The replica lost its engine and is being replaced; try again.")


async def send(request: Request, there: ClientSession, base: str) -> ClientResponse:
    """Ask `base`, a scheme, a host and perhaps a prefix, for what `request` asks for.

    Raises:
        ClientConnectionError: nobody answered.
    """
    path = request.scope["path"].removeprefix(request.scope.get("root_path", ""))
    query = f"?{request.url.query}" if request.url.query else ""
    return await there.request(
        request.method,
        URL(f"{base}{quote(path)}{query}", encoded=True),  # as it came, not normalized
        headers=[(k, v) for k, v in request.headers.items() if k not in HOP_BY_HOP],
        data=await request.body(),
        allow_redirects=False,
    )


def passed_on(answer: ClientResponse) -> Response:
    """An answer that arrives, as one that is given."""
    response = StreamingResponse(_parts(answer), answer.status)
    response.raw_headers = [
        (name, value)
        for name, value in ((name.lower(), value) for name, value in answer.raw_headers)
        if name.decode() not in HOP_BY_HOP | REWRITTEN
    ]
    return response


def unavailable(message: str) -> Response:
    """503, in the form of vLLM's errors."""
    error = {"message": message, "type": "ServiceUnavailableError", "param": None, "code": 503}
    return JSONResponse({"error": error}, status_code=503)


async def _parts(answer: ClientResponse) -> AsyncIterator[bytes]:
    try:
        async for part in answer.content.iter_any():
            yield part
    finally:
        answer.close()  # no-op for a complete answer, whose connection is in use again

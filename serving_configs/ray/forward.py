"""Passing a request on to vLLM, and its answer back, unchanged but for what is of a connection."""

from collections.abc import AsyncIterator
from urllib.parse import quote

from aiohttp import (
    ClientConnectionError,
    ClientResponse,
    ClientSession,
    ClientTimeout,
    UnixConnector,
)
from fastapi import Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from yarl import URL

METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"]
# Of one connection, not of what is passed on over it (RFC 9110, 7.6.1).
HOP_BY_HOP = {"connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"}
REWRITTEN = {"server", "date"}  # Serve's proxy writes its own


def session(socket: str) -> ClientSession:
    """Connections, any number, to the vLLM that listens on this Unix socket."""
    return ClientSession(
        "http://vllm",
        connector=UnixConnector(socket, limit=0),
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
    path = request.scope["path"].removeprefix(request.scope.get("root_path", ""))
    query = f"?{request.url.query}" if request.url.query else ""
    try:
        answer = await vllm.request(
            request.method,
            URL(f"http://vllm{quote(path)}{query}", encoded=True),  # as it came, not normalized
            headers=[(k, v) for k, v in request.headers.items() if k not in HOP_BY_HOP],
            data=await request.body(),
            allow_redirects=False,
        )
    except ClientConnectionError:
        message = "The replica lost its engine and is being replaced; try again."
        error = {"message": message, "type": "ServiceUnavailableError", "param": None, "code": 503}
        return JSONResponse({"error": error}, status_code=503)
    response = StreamingResponse(_parts(answer), answer.status)
    response.raw_headers = [
        (name.lower(), value)
        for name, value in answer.raw_headers
        if name.decode().lower() not in HOP_BY_HOP | REWRITTEN
    ]
    return response


async def _parts(answer: ClientResponse) -> AsyncIterator[bytes]:
    try:
        async for part in answer.content.iter_any():
            yield part
    finally:
        answer.close()  # no-op for a complete answer, whose connection is in use again

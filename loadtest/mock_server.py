"""A mock of an OpenAI-compatible server. Its answers have known timing, to check the client.

Token k of an answer is due at arrival + ttft + k x itl. These times are absolute, so a late token
does not delay the next. It serves /v1/completions, /v1/chat/completions, /v1/models and /health.
"""

import asyncio
import json
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

_MAX_BODY = 64 << 20


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds until the first token and between tokens."""

    ttft: float = 0.1
    itl: float = 0.02


@dataclass(frozen=True, slots=True)
class Asked:
    """A request: how many tokens of answer it wants, and when it came by the loop's clock."""

    prompt: list[Any]
    count: int
    chat: bool
    arrived: float


class Mock:
    """The mock server."""

    def __init__(self, timing: Timing) -> None:
        self.timing = timing

    async def serve(self, host: str, port: int) -> asyncio.Server:
        """Start to serve. Port 0 takes a free port, see `server.sockets[0].getsockname()`."""

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                while True:
                    await self._serve_one(reader, writer)
            except (ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
                pass  # the client has disconnected
            finally:
                writer.close()

        return await asyncio.start_server(connected, host, port, backlog=1024)

    async def answer(self, asked: Asked, writer: asyncio.StreamWriter) -> None:
        """Answer token by token."""
        head = b"Content-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        writer.write(b"HTTP/1.1 200 OK\r\n" + head)
        loop = asyncio.get_running_loop()
        for k in range(asked.count):
            due = asked.arrived + self.timing.ttft + k * self.timing.itl
            await asyncio.sleep(due - loop.time())
            if asked.chat and k == 0:
                role = {"delta": {"role": "assistant", "content": ""}, "finish_reason": None}
                _write_event(writer, {"choices": [role]})
            text = {"delta": {"content": " mock"}} if asked.chat else {"text": " mock"}
            finish = "length" if k == asked.count - 1 else None
            _write_event(writer, {"choices": [{"index": 0, **text, "finish_reason": finish}]})
            await writer.drain()
        usage = {"prompt_tokens": len(asked.prompt), "completion_tokens": asked.count}
        _write_event(writer, {"choices": [], "usage": usage})
        _chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        await writer.drain()

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        arrived = asyncio.get_running_loop().time()
        method, path, _ = head[0].split(" ", 2)
        headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in head[1:])}
        body = await reader.readexactly(min(int(headers.get("content-length", "0")), _MAX_BODY))
        if method == "GET":
            models = {"object": "list", "data": [{"id": "mock", "object": "model"}]}
            known = {"/health": {}, "/v1/models": models}
            return _reply(writer, 200 if path in known else 404, known.get(path, {}))
        if path not in ("/v1/completions", "/v1/chat/completions"):
            return _reply(writer, 404, {"error": {"message": f"no {path}"}})
        try:
            request = json.loads(body)
            count = int(request.get("max_completion_tokens") or request["max_tokens"])
            prompt = _prompt(request)
        except (ValueError, KeyError, TypeError) as error:
            return _reply(writer, 400, {"error": {"message": f"bad request: {error!r}"}})
        chat = path.endswith("chat/completions")
        return await self.answer(Asked(prompt, count, chat, arrived), writer)


def _prompt(request: dict[str, Any]) -> list[Any]:
    """The token ids of a prompt, or its words."""
    if "messages" in request:
        return [word for message in request["messages"] for word in message["content"].split()]
    prompt = request["prompt"]
    return prompt if isinstance(prompt, list) else prompt.split()


def _write_event(writer: asyncio.StreamWriter, content: dict[str, Any]) -> None:
    _chunk(writer, b"data: " + json.dumps(content).encode() + b"\n\n")


def _reply(writer: asyncio.StreamWriter, status: int, content: dict[str, Any]) -> None:
    """Write an answer that is no stream."""
    body = json.dumps(content).encode()
    writer.write(
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n".encode()
        + body
    )


def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(b"%x\r\n%b\r\n" % (len(data), data))

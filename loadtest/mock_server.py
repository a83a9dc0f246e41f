"""A mock of an OpenAI-compatible server. Its answers have known timing, to check the client.

Token k of an answer is due at arrival + ttft + k x itl. These times are absolute, so a late token
does not delay the next. On a busy machine some tokens leave late. With a log, the mock writes when
each token left, so that the client's numbers can be compared with what was sent instead of what was
due. With a fault, it does to some requests what servers do in bad moments, and its log still tells
the truth. It serves /v1/completions, /v1/chat/completions, /v1/models and /health.
"""

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count as counting
from typing import Any, Literal, TextIO, get_args

_MAX_BODY = 64 << 20
# The log identifies a prompt by this many first tokens (or words). They are enough to be unique.
_OPENING = 8


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds until the first token and between tokens."""

    ttft: float = 0.1
    itl: float = 0.02


FaultKind = Literal["none", "refuse", "busy", "hang", "stall", "empty-first", "null-error"]
FAULTS: tuple[FaultKind, ...] = get_args(FaultKind)
STALL = 0.5  # seconds


@dataclass(frozen=True, slots=True)
class Fault:
    """What the mock does to every `every`-th request.

    - refuse: it closes the connection without an answer.
    - busy: it answers 503.
    - hang: it never answers.
    - stall: half a second passes in the middle of the answer.
    - empty-first: an event without text comes at once, before there is a token.
    - null-error: each event has `"error": null`, which is no error.
    """

    kind: FaultKind = "none"
    every: int = 1

    def hits(self, number: int) -> bool:
        """Whether the request with this number, from 0, is one of them."""
        return self.kind != "none" and number % self.every == self.every // 2


async def serve(
    timing: Timing,
    host: str,
    port: int,
    log: TextIO | None = None,
    fault: Fault | None = None,
    clock: Callable[[], float] = time.time,
) -> asyncio.Server:
    """Start to serve. Port 0 takes a free port, see `server.sockets[0].getsockname()`.

    `log` gets one line of JSON for each request, when its fate is known: `opening`, the first
    tokens of the prompt; `arrived`, when the request had arrived; `sent`, when each token was
    handed to the socket; `fault`, what was done to it. Times are in seconds, by `clock`: since the
    epoch, unless another is given.
    """
    numbers = counting()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await _serve_one(reader, writer, timing, log, fault or Fault(), numbers, clock):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # the client has disconnected
        finally:
            writer.close()

    return await asyncio.start_server(connected, host, port, backlog=1024)


async def _serve_one(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    timing: Timing,
    log: TextIO | None,
    fault: Fault,
    numbers: Iterator[int],
    clock: Callable[[], float],
) -> bool:
    """Answer one request. Returns whether the connection can take another."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    arrived = asyncio.get_running_loop().time()
    method, path, _ = head[0].split(" ", 2)
    headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in head[1:])}
    length = int(headers.get("content-length", "0"))
    body = await reader.readexactly(min(length, _MAX_BODY))
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
    kind: FaultKind = fault.kind if fault.hits(next(numbers)) else "none"

    def tell(sent: list[float]) -> None:
        if log is not None:
            came = clock() - (asyncio.get_running_loop().time() - arrived)
            line = {"opening": prompt[:_OPENING], "arrived": came, "sent": sent, "fault": kind}
            log.write(json.dumps(line) + "\n")

    if kind in ("refuse", "busy", "hang"):
        tell([])
        if kind == "hang":
            await reader.read()  # until the client gives up
        if kind == "busy":
            return _reply(writer, 503, {"error": {"message": "busy"}})
        return False
    tell(await _stream(writer, timing, arrived, chat, count, len(prompt), kind, clock))
    return True


async def _stream(
    writer: asyncio.StreamWriter,
    timing: Timing,
    arrived: float,
    chat: bool,
    count: int,
    prompt_tokens: int,
    fault: FaultKind,
    clock: Callable[[], float],
) -> list[float]:
    """Answer token by token. Returns when each token was sent, by `clock`."""
    writer.write(
        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    loop = asyncio.get_running_loop()
    sent = []
    more: dict[str, Any] = {"error": None} if fault == "null-error" else {}
    if fault == "empty-first":
        nothing = {"delta": {"content": ""}} if chat else {"text": ""}
        _event(writer, {"choices": [{"index": 0, **nothing, "finish_reason": None}]})
    for k in range(count):
        late = STALL if fault == "stall" and k > count // 2 else 0.0
        await asyncio.sleep(arrived + timing.ttft + k * timing.itl + late - loop.time())
        if chat and k == 0:
            role = {"delta": {"role": "assistant", "content": ""}, "finish_reason": None}
            _event(writer, {"choices": [role]})
        finish = "length" if k == count - 1 else None
        token = {"delta": {"content": " mock"}} if chat else {"text": " mock"}
        sent.append(clock())
        _event(writer, {"choices": [{"index": 0, **token, "finish_reason": finish}], **more})
        await writer.drain()
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": count}
    _event(writer, {"choices": [], "usage": usage})
    _chunk(writer, b"data: [DONE]\n\n")
    writer.write(b"0\r\n\r\n")
    await writer.drain()
    return sent


def _prompt(request: dict[str, Any]) -> list[Any]:
    """The token ids of a prompt, or its words."""
    if "messages" in request:
        return [word for message in request["messages"] for word in message["content"].split()]
    prompt = request["prompt"]
    return prompt if isinstance(prompt, list) else prompt.split()


def _event(writer: asyncio.StreamWriter, content: dict[str, Any]) -> None:
    _chunk(writer, b"data: " + json.dumps(content).encode() + b"\n\n")


def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(b"%x\r\n%b\r\n" % (len(data), data))


def _reply(writer: asyncio.StreamWriter, status: int, content: dict[str, Any]) -> bool:
    body = json.dumps(content).encode()
    reason = {200: "OK", 400: "Bad Request", 404: "Not Found", 503: "Service Unavailable"}[status]
    writer.write(
        f"HTTP/1.1 {status} {reason}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n".encode()
        + body
    )
    return True

"""One streamed request to an OpenAI-compatible server; every event gets a time stamp on arrival.

This is plain blocking code of the standard library: `HTTPResponse.read1` returns what the socket
has and does not wait for a full buffer. Under locust, gevent makes it cooperative. Each request
opens its own connection, as independent users do.
"""

import http.client
import json
import os
import socket
import ssl
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from loadtest.client.sse import SseParser
from loadtest.errors import LoadTestError
from loadtest.runs.failures import CLIENT_ERRNOS, CLIENT_FAULT
from loadtest.runs.records import Record
from loadtest.runs.target import Target
from loadtest.traffic import prompts
from loadtest.traffic.schedule import PromptRules, ScheduledRequest

_CHUNK = 1 << 16


def request_body(
    target: Target, request: ScheduledRequest, index: int, rules: PromptRules
) -> bytes:
    """The JSON body of a scheduled request: temperature 0, streamed, with usage at the end."""
    body: dict[str, Any] = {
        "model": target.model,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if target.endpoint == "completions":
        body["prompt"] = prompts.token_ids(request, index, rules)
        body["max_tokens"] = request.output_length
    else:
        body["messages"] = [{"role": "user", "content": prompts.text(request, index, rules)}]
        body["max_completion_tokens"] = request.output_length
    if target.ignore_eos:
        body["ignore_eos"] = True
        body["min_tokens"] = request.output_length
    return json.dumps(body, separators=(",", ":")).encode()


def send(
    target: Target, body: bytes, record: Record, clock: Callable[[], float], deadline: float
) -> None:
    """Send `body` and fill in `record`. It never raises, whatever the server does.

    `clock` returns seconds since the start of the run. The request is given up at `deadline`.
    """
    record.sent = clock()
    try:
        connection = _connection(target, min(target.timeout, max(deadline - record.sent, 0.001)))
        try:
            headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
            if key := os.environ.get("OPENAI_API_KEY"):
                headers["Authorization"] = f"Bearer {key}"
            connection.request("POST", target.path, body, headers)
            # The connection forgets it where the server says that it will close.
            sock = connection.sock
            response = connection.getresponse()
            record.status = response.status
            _read(response, sock, target.timeout, record, clock, deadline)
        finally:
            connection.close()
    except TimeoutError:
        record.error = _late(clock(), deadline, target.timeout)
    except (OSError, http.client.HTTPException, LoadTestError) as error:
        mine = isinstance(error, OSError) and error.errno in CLIENT_ERRNOS
        text = f"{CLIENT_FAULT if mine else ''}{type(error).__name__}: {error}"
        record.error = text[:300]
    record.ended = clock()


def _connection(target: Target, timeout: float) -> http.client.HTTPConnection:
    url = urlsplit(target.base_url)
    host = url.hostname or ""
    if url.scheme == "https":
        return http.client.HTTPSConnection(host, url.port, timeout=timeout, context=_tls_context())
    return http.client.HTTPConnection(host, url.port, timeout=timeout)


_tls: list[ssl.SSLContext] = []


def _tls_context() -> ssl.SSLContext:
    # Built once: loading the root certificates takes tens of milliseconds and blocks every other
    # request of this process.
    if not _tls:
        _tls.append(ssl.create_default_context())
    return _tls[0]


def _read(
    response: http.client.HTTPResponse,
    sock: socket.socket,
    timeout: float,
    record: Record,
    clock: Callable[[], float],
    deadline: float,
) -> None:
    if response.status != 200:
        record.error = f"HTTP {response.status}: {response.read(300).decode(errors='replace')}"
        return
    parser = SseParser()
    empty: list[float] = []  # events without text that came before the first text
    while chunk := response.read1(_CHUNK):
        now = clock()
        for event in parser.feed(chunk):
            if event == b"[DONE]":
                _count_leading(empty, record)
                if not record.tokens and record.error is None:
                    record.error = "the stream ended without a token"
                return
            _take(event, now, record, empty)
            if record.error is not None:
                return
        if now > deadline:
            raise TimeoutError
        sock.settimeout(max(min(timeout, deadline - now), 0.001))
    record.error = "the stream broke off before [DONE]"


def _take(event: bytes, now: float, record: Record, empty: list[float]) -> None:
    try:
        content = json.loads(event)
        if content.get("error") is not None:
            record.error = f"error in the stream: {json.dumps(content['error'])}"[:300]
            return
        if usage := content.get("usage"):
            record.prompt_tokens = usage["prompt_tokens"]
            record.completion_tokens = usage["completion_tokens"]
        for choice in content.get("choices") or ():
            record.finish_reason = choice.get("finish_reason") or record.finish_reason
            if _has_text(choice) or (record.tokens and _may_be_a_token(choice)):
                record.tokens.append(now)
            elif _may_be_a_token(choice):
                empty.append(now)
    except (ValueError, TypeError, KeyError, AttributeError):
        record.error = f"not a completion chunk: {event[:200].decode(errors='replace')}"


def _has_text(choice: dict[str, Any]) -> bool:
    delta = choice.get("delta")
    if delta is None:
        return bool(choice["text"])
    keys = ("content", "reasoning_content", "reasoning", "tool_calls")
    return any(delta.get(key) for key in keys)


def _may_be_a_token(choice: dict[str, Any]) -> bool:
    """Whether an event without text may carry a token.

    vLLM sends empty text while a character's bytes are incomplete. That is a token, too. The first
    chunk of a chat only names the role, and the last one only the reason to finish.
    """
    return choice.get("finish_reason") is None and "role" not in (choice.get("delta") or {})


def _count_leading(empty: list[float], record: Record) -> None:
    """Count events without text that came first, if the server's own count needs them.

    Some servers open a stream with an empty event, before there is a token. It would pass for the
    first token.
    """
    if record.completion_tokens == len(record.tokens) + len(empty):
        record.tokens[:0] = empty


def _late(now: float, deadline: float, timeout: float) -> str:
    if now >= deadline - 0.002:
        return "unfinished when the run ended"
    return f"no answer for {timeout:g} s"

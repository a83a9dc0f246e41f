"""One streamed request to an OpenAI-compatible server; every event gets a time stamp on arrival.

This is plain blocking code of the standard library: `HTTPResponse.readline` returns a line as soon
as its end has come, and does not wait for a full buffer. Under locust, gevent makes it cooperative.
Each request opens its own connection, as independent users do.
"""

import http.client
import json
import socket
from collections.abc import Callable
from typing import Any

from loadtest.errors import LoadTestError
from loadtest.runs.access import connection
from loadtest.runs.records import CLIENT_ERRNOS, CLIENT_FAULT, Record
from loadtest.runs.target import Endpoint, Target
from loadtest.traffic import prompts
from loadtest.traffic.schedule import PromptRules, Schedule, ScheduledRequest

_MAX_EVENT = 8 << 20  # bytes
# A socket may time out that many seconds before it is due.
_EARLY = 0.002
_LENGTHS = {"max_tokens", "max_completion_tokens", "min_tokens", "ignore_eos", "stop"}


def request_body(
    target: Target, request: ScheduledRequest, index: int, rules: PromptRules
) -> bytes:
    """The JSON body of a scheduled request: temperature 0, streamed, with usage at the end.

    What the schedule says of the body replaces that.
    """
    body: dict[str, Any] = {
        "model": target.model,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if target.endpoint == "completions":
        if "prompt" not in request.body:
            body["prompt"] = prompts.token_ids(request, index, rules)
        body["max_tokens"] = request.output_length
    else:
        if "messages" not in request.body:
            body["messages"] = [{"role": "user", "content": prompts.text(request, index, rules)}]
        body["max_completion_tokens"] = request.output_length
    if target.ignore_eos:
        body["ignore_eos"] = True
        body["min_tokens"] = request.output_length
    return json.dumps(body | request.body, separators=(",", ":")).encode()


def refuse_another_length(target: Target, request: ScheduledRequest, record: Record) -> None:
    """Let an answer fail that has another length than the target was told to give it.

    A server that stops early is done early, and would look faster.
    """
    if not (target.ignore_eos and record.ok) or _LENGTHS & request.body.keys():
        return
    count = record.completion_tokens
    if count is None and record.finish_reason == "stop":
        record.error = "another length: it stopped, although ignore_eos was asked"
    elif count is not None and count != record.output_length:
        asked = record.output_length
        record.error = f"another length: {count} tokens, and ignore_eos asked for {asked}"


def check_bodies(schedule: Schedule, endpoint: Endpoint) -> None:
    """Raise LoadTestError if a request has a body for the other endpoint."""
    other, way_out = (
        ("messages", "chat") if endpoint == "completions" else ("prompt", "completions")
    )
    for number, request in enumerate(schedule.requests, start=1):
        if other in request.body:
            raise LoadTestError(
                f"request {number} of the schedule has {other!r} in its body, which /v1/{endpoint} "
                f"does not take; ask with the endpoint {way_out}"
            )


def send(
    target: Target,
    body: bytes,
    record: Record,
    clock: Callable[[], float],
    deadline: float,
) -> None:
    """Send `body` and fill in `record`. It never raises, whatever the server does.

    `clock` returns seconds since the start of the run. The request is given up at `deadline`.
    """
    record.sent = clock()
    try:
        link = connection(target, min(target.timeout, max(deadline - record.sent, 0.001)))
        try:
            headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
            link.request("POST", target.path, body, headers | dict(target.headers))
            # The connection forgets it where the server says that it will close.
            sock = link.sock
            response = link.getresponse()
            record.status = response.status
            _read(response, sock, target.timeout, record, clock, deadline)
        finally:
            link.close()
    except TimeoutError:
        over = clock() >= deadline - _EARLY
        silent = f"no answer for {target.timeout:g} s"
        record.error = "unfinished when the run ended" if over else silent
    except (OSError, http.client.HTTPException, LoadTestError) as error:
        mine = isinstance(error, OSError) and error.errno in CLIENT_ERRNOS
        text = f"{CLIENT_FAULT if mine else ''}{type(error).__name__}: {error}"
        record.error = text[:300]
    record.ended = clock()


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
    empty: list[tuple[int, float]] = []  # events without text: how many with text came before
    # Servers of this API send each event as one line of data (WHATWG HTML standard, section 9.2).
    while line := response.readline(_MAX_EVENT):
        name, _, data = line.rstrip(b"\r\n").partition(b":")
        if len(line) == _MAX_EVENT:
            raise LoadTestError(f"a server-sent event of more than {_MAX_EVENT} bytes")
        now, event = clock(), data.removeprefix(b" ")
        if name == b"data" and event == b"[DONE]":
            _count_empty(empty, record)
            if not record.tokens and record.error is None:
                record.error = "the stream ended without a token"
            return
        if name == b"data":
            _take(event, now, record, empty)
            if record.error is not None:
                return
        # Also after a line without data: a server may send only comments, to keep the connection.
        if now > deadline:
            raise TimeoutError
        sock.settimeout(max(min(timeout, deadline - now), 0.001))
    # Some servers end a whole answer without [DONE].
    _count_empty(empty, record)
    if record.finish_reason is None or not record.tokens:
        record.error = "the stream broke off before [DONE]"


def _take(event: bytes, now: float, record: Record, empty: list[tuple[int, float]]) -> None:
    try:
        content = json.loads(event)
        if content.get("error") is not None:
            record.error = f"error in the stream: {json.dumps(content['error'])}"[:300]
            return
        if usage := content.get("usage"):
            record.prompt_tokens = _count(usage["prompt_tokens"])
            record.completion_tokens = _count(usage["completion_tokens"])
        for choice in content.get("choices") or ():
            if isinstance(reason := choice.get("finish_reason"), str) and reason:
                record.finish_reason = reason
            if _has_text(choice):
                record.tokens.append(now)
            elif _may_be_a_token(choice):
                empty.append((len(record.tokens), now))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        record.error = f"not a completion chunk: {event[:200].decode(errors='replace')}"


def _count(tokens: object) -> int | None:
    """The server's count, unless it is of a type that no record may have, such as "3" or 3.0."""
    return tokens if type(tokens) is int else None


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


def _count_empty(empty: list[tuple[int, float]], record: Record) -> None:
    """Count events without text as tokens if the server's own count needs them.

    Some servers open a stream with an empty event before there is a token, and some send empty
    events in between to keep the connection. They would pass for the first or the last token.
    """
    missing = (record.completion_tokens or 0) - len(record.tokens)
    after_text = [event for event in empty if event[0] > 0]
    for moments in (after_text, empty):
        if moments and len(moments) == missing:
            for place, now in reversed(moments):
                record.tokens.insert(place, now)
            return

"""The client stamps each event on arrival, and names every way in which a request can fail."""

import asyncio
import errno
import http.client
import itertools
import json
import math
import re
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import AsyncMock

import pytest

from loadtest.client.client import check_bodies, request_body, send
from loadtest.errors import LoadTestError
from loadtest.mock_server import Asked, Mock, Timing
from loadtest.runs.access import request_headers
from loadtest.runs.records import Record, is_the_clients, read_records, write_records
from loadtest.runs.target import Endpoint, Target
from loadtest.traffic.schedule import PromptRules, Schedule, ScheduledRequest
from tests.loadtest.servers import DONE, STREAM, TOKEN, mock, scripted
from tests.support.waiting import PATIENCE

REQUEST = ScheduledRequest(timestamp=0, input_length=20, output_length=5)


def ask(
    url: str,
    endpoint: Endpoint = "completions",
    timeout: float = PATIENCE,
    clock: Callable[[], float] = time.perf_counter,
    deadline: float = math.inf,
) -> Record:
    target = Target(url, "m", endpoint, timeout)
    record = Record(0, clock(), 20, 5)
    body = request_body(target, REQUEST, 0, PromptRules())
    send(target, body, record, clock, deadline)
    return record


def answered_with(*parts: bytes) -> Record:
    def play(connection: socket.socket) -> None:
        for part in parts:
            connection.sendall(part)

    with scripted(play) as url:
        return ask(url)


def chunk(text: str, finish: str | None = None) -> bytes:
    return event([{"text": text, "finish_reason": finish}])


def event(choices: list[object], **more: object) -> bytes:
    return b"data: " + json.dumps({"choices": choices} | more).encode() + b"\n\n"


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_a_whole_answer_is_recorded(endpoint: Endpoint) -> None:
    with mock(Timing(0.001, 0.001)) as url:
        record = ask(url, endpoint)
    assert record.error is None
    assert (record.status, record.finish_reason) == (200, "length")
    assert (record.prompt_tokens, record.completion_tokens) == (20, 5)
    # The chat's first chunk, which names the role, is no token.
    assert len(record.tokens) == 5
    moments = [record.scheduled, record.sent, *record.tokens, record.ended]
    assert moments == sorted(moments)


def test_what_a_schedule_says_of_the_body_is_sent() -> None:
    own = {"prompt": "Dear", "model": "lora", "temperature": 0.7}
    request = REQUEST.model_copy(update={"body": own})
    body = json.loads(request_body(Target("http://h", "m"), request, 0, PromptRules()))
    assert own.items() <= body.items()
    assert (body["stream"], body["max_tokens"]) == (True, 5)
    schedule = Schedule((REQUEST, request), PromptRules(), {})
    check_bodies(schedule, "completions")
    with pytest.raises(LoadTestError, match=r"request 2 .*'prompt'"):
        check_bodies(schedule, "chat")


def test_an_event_is_stamped_before_the_next_one_is_sent() -> None:
    # The proof that nothing waits for a buffer to fill: the server sends an event of 60 bytes
    # only after the client has read its clock for the one before.
    stamped = threading.Semaphore(0)

    def clock() -> float:
        stamped.release()
        return time.perf_counter()

    def play(connection: socket.socket) -> None:
        connection.sendall(STREAM)
        assert stamped.acquire(timeout=PATIENCE)  # the moment of sending
        for _ in range(50):
            connection.sendall(TOKEN)
            for _ in range(TOKEN.count(b"\n")):  # the clock is read for each line
                if not stamped.acquire(timeout=PATIENCE):
                    return  # breaks the stream off, which fails the test
        connection.sendall(DONE)

    with scripted(play) as url:
        record = Record(0, 0.0, 1, 1)
        send(Target(url, "m"), b"{}", record, clock, math.inf)
    assert record.error is None
    assert len(record.tokens) == 50
    assert min(record.itls) > 0


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"HTTP/1.1 503 Busy\r\nContent-Length: 4\r\n\r\nfull", "HTTP 503: full"),
        (STREAM + TOKEN + b'data: {"error": {"message": "gone"}}\n\n', "error in the stream"),
        (STREAM + TOKEN, "the stream broke off before [DONE]"),
        (STREAM + DONE, "the stream ended without a token"),
        (STREAM + b"data: {oops\n\n", "not a completion chunk: {oops"),
        (STREAM + b"data: 3\n\n", "not a completion chunk: 3"),
        (STREAM + event([{}]), "not a completion chunk"),
        (STREAM + event([], usage={"prompt_tokens": 1}), "not a completion chunk"),
        (STREAM + b"data: " + b"[" * 100_000 + b"\n\n", "not a completion chunk"),
        (STREAM + b"data: " + b"x" * (8 << 20), "a server-sent event of more than"),
        (b"nonsense\r\n\r\n", "BadStatusLine"),
        (b"", "RemoteDisconnected"),
    ],
)
def test_every_failure_is_named(answer: bytes, error: str) -> None:
    record = answered_with(answer)
    assert record.error is not None
    assert error in record.error
    assert not math.isnan(record.sent)
    assert not math.isnan(record.ended)


def test_comments_other_fields_and_chunks_that_cut_a_line_change_nothing() -> None:
    no_error = TOKEN.replace(b"{", b'{"error":null,', 1)
    stream = b": ping\r\n\r\nevent: token\n" + no_error + TOKEN.replace(b"\n", b"\r\n")
    chunked = STREAM.replace(b"Connection: close", b"Transfer-Encoding: chunked")
    parts = [b"1\r\n%b\r\n" % bytes([byte]) for byte in stream + DONE]
    for record in (
        answered_with(STREAM, stream, DONE),
        answered_with(chunked, *parts, b"0\r\n\r\n"),
    ):
        assert record.error is None
        assert len(record.tokens) == 2


def test_a_whole_stream_without_done_is_an_answer() -> None:
    record = answered_with(STREAM, TOKEN, TOKEN, chunk("a", "length"))
    assert record.error is None
    assert len(record.tokens) == 3


def until_the_client_hangs_up(connection: socket.socket) -> None:
    connection.sendall(STREAM + TOKEN)
    connection.recv(1)


@pytest.mark.parametrize("token_at", [1000.0, 1000.5])
def test_the_end_of_the_run_ends_a_request(token_at: float) -> None:
    # Scheduled and sent at 0; the run ends at 1000. If the client waited on, the server would hang
    # up first.
    moments = itertools.chain([0.0, 0.0], itertools.repeat(token_at))
    with scripted(until_the_client_hangs_up) as url:
        record = ask(url, timeout=2 * PATIENCE, clock=lambda: next(moments), deadline=1000.0)
    assert record.error == "unfinished when the run ended"
    assert record.tokens == [token_at]


def test_the_end_of_the_run_ends_a_request_that_gets_only_comments() -> None:
    moments = itertools.count(0.0, 100.0)
    with scripted(STREAM + b": ping\n\n" * 20) as url:
        record = ask(url, clock=lambda: next(moments), deadline=1000.0)
    assert record.error == "unfinished when the run ended"


def test_silence_ends_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    token_sent = threading.Event()
    getresponse = http.client.HTTPConnection.getresponse

    def play(connection: socket.socket) -> None:
        connection.sendall(STREAM + TOKEN)
        token_sent.set()
        connection.recv(1)

    def read_after_the_token(connection: http.client.HTTPConnection) -> http.client.HTTPResponse:
        # Else a server that is held up would be silent before the token already.
        assert token_sent.wait(PATIENCE)
        return getresponse(connection)

    monkeypatch.setattr(http.client.HTTPConnection, "getresponse", read_after_the_token)
    with scripted(play) as url:
        record = ask(url, timeout=0.05)
    assert record.error == "no answer for 0.05 s"
    assert len(record.tokens) == 1


@pytest.mark.parametrize(("counted", "expected"), [(3, 3), (2, 2), (1, 1), (7, 1), (None, 1)])
def test_empty_text_is_a_token_if_the_server_counts_it(counted: int | None, expected: int) -> None:
    # vLLM sends empty text while the bytes of a character are incomplete. Other servers open a
    # stream with an empty event before there is a token.
    usage = {"prompt_tokens": 20, "completion_tokens": counted}
    last = event([], usage=usage) if counted else b""
    record = answered_with(STREAM, chunk(""), TOKEN, chunk(""), chunk("", "stop"), last, DONE)
    assert record.error is None
    assert len(record.tokens) == expected
    assert record.tokens == sorted(record.tokens)
    assert record.finish_reason == "stop"


@pytest.mark.parametrize("count", ["3", 3.0, True, {}])
def test_what_no_record_may_have_is_not_taken(count: object, tmp_path: Path) -> None:
    usage = {"prompt_tokens": count, "completion_tokens": count}
    choice = {"text": "a", "finish_reason": {"type": "stop"}}
    record = answered_with(STREAM, TOKEN, event([choice], usage=usage), DONE)
    assert (record.error, len(record.tokens)) == (None, 2)
    assert (record.prompt_tokens, record.completion_tokens, record.finish_reason) == (None,) * 3
    write_records([record], tmp_path / "records.0.jsonl")
    assert read_records([tmp_path / "records.0.jsonl"])[0].tokens


def test_a_socket_that_the_client_lacks_is_its_own_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_files(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(http.client.HTTPConnection, "connect", out_of_files)
    record = ask("http://127.0.0.1:1")
    assert is_the_clients(record.error)
    assert not is_the_clients("OSError: [Errno 104] Connection reset by peer")


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://h", "http://", "http://h:x", ""])
def test_a_base_url_is_a_url(url: str) -> None:
    with pytest.raises(LoadTestError, match=re.escape(repr(url))):
        Target(url, "m")


def test_a_base_url_is_what_comes_before_v1() -> None:
    assert Target("https://h/team/llm/", "m", "chat").path == "/team/llm/v1/chat/completions"
    with pytest.raises(LoadTestError, match="/v1"):
        Target("https://h/v1/", "m")
    with pytest.raises(LoadTestError, match="URL of h") as caught:
        Target("https://me:secret@h", "m")
    assert "secret" not in str(caught.value)


def test_the_mock_sends_tokens_when_they_are_due(monkeypatch: pytest.MonkeyPatch) -> None:
    sent, now = list[float](), 100.0

    async def leap(seconds: float) -> None:
        nonlocal now
        now += seconds

    async def answered() -> None:
        monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now)
        monkeypatch.setattr(asyncio, "sleep", leap)
        writer = AsyncMock(write=lambda data: sent.append(now) if b"mock" in data else None)
        await Mock(Timing(0.05, 0.01)).answer(Asked([], 5, False, now), writer)

    asyncio.run(answered())
    assert sent == pytest.approx([100.05, 100.06, 100.07, 100.08, 100.09])


@pytest.mark.parametrize("key", ["sk-secret\n", "sk secret\r\nX: y", "", " ", "\u00e9"])
def test_a_key_that_no_header_may_have_is_refused_and_not_shown(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", key)
    if key:
        with pytest.raises(LoadTestError) as caught:
            request_headers(())
        assert str(caught.value).startswith("OPENAI_API_KEY: its ")
        assert "secret" not in str(caught.value)
    else:
        assert request_headers(()) == ()
    (tmp_path / "key").write_text("sk-good\n")
    assert request_headers((), tmp_path / "key") == (("Authorization", "Bearer sk-good"),)
    with pytest.raises(LoadTestError, match="X-Team") as caught:
        request_headers([f"X-Team: sec\nret{key}"])
    assert "sec" not in str(caught.value)

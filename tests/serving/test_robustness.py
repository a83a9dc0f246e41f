"""What a public server must survive: clients that vanish, requests made to break it, SIGTERM.

One server for all, with a key and a model whose layers all differ; SIGTERM comes last.
"""

import http.client
import json
import os
import re
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.serving.models import HETEROGENEOUS, write_model
from tests.serving.server import Server, serve
from tests.support.waiting import PATIENCE, wait_until

pytestmark = pytest.mark.slow

KEY = "correct horse"
CONTEXT, VOCABULARY = 512, 4096
JSON = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
PROMPT = [11, 45, 300, 7, 912]
GRACE = 300  # seconds after SIGTERM for requests that are running; a quiet machine takes two


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    root = tmp_path_factory.mktemp("robustness")
    write_model(root / "model", HETEROGENEOUS[:4])
    flags = ("--load-format", "gac", "--served-model-name", "m", "--api-key", KEY)
    with serve(root / "model", root / "log", *flags, "--shutdown-timeout", str(GRACE)) as running:
        yield running


def post(
    server: Server,
    body: bytes | dict[str, Any],
    path: str = "/v1/completions",
    headers: dict[str, str] = JSON,
) -> tuple[int, bytes]:
    """Status and body of the response."""
    url = urlsplit(server.url)
    assert url.hostname is not None
    connection = http.client.HTTPConnection(url.hostname, url.port, timeout=PATIENCE)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    try:
        connection.request("POST", path, data, headers)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def asked(**changes: Any) -> dict[str, Any]:
    return {"model": "m", "prompt": PROMPT, "max_tokens": 4, "temperature": 0} | changes


def chat(content: Any = "x", **changes: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}]
    return {"model": "m", "messages": messages, "max_tokens": 4, **changes}


def gauges(server: Server) -> dict[str, float]:
    """Requests running and waiting, and the share of the KV cache in use."""
    found: dict[str, float] = {}
    for line in server.metrics().splitlines():
        sample = re.match(
            r"vllm:(num_requests_running|num_requests_waiting|kv_cache_usage_perc)\{.*\} (\S+)$",
            line,
        )
        if sample:
            found[sample[1]] = found.get(sample[1], 0.0) + float(sample[2])
    assert len(found) == 3
    return found


def answer(server: Server) -> str:
    status, body = post(server, asked(max_tokens=16))
    assert status == 200, body
    text: str = json.loads(body)["choices"][0]["text"]
    return text


def vanish(server: Server, number: int, busy: threading.Event) -> None:
    """Request a long answer and hang up: before, at the start of, or within the response.

    Who hangs up before it waits until the engine is seen to be `busy`.
    """
    url = urlsplit(server.url)
    body = json.dumps(
        asked(prompt=[5 + number] * 40, max_tokens=450, ignore_eos=True, stream=True)
    ).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: m\r\nAuthorization: Bearer {KEY}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection((url.hostname, url.port), timeout=PATIENCE) as connection:
        connection.sendall(head.encode() + body)
        received = b""
        wanted = number % 4
        while received.count(b"data: ") < wanted:
            chunk = connection.recv(4096)
            assert chunk, received
            received += chunk
        if wanted == 0:
            assert busy.wait(PATIENCE)


def test_clients_that_vanish_leave_no_request_behind(server: Server) -> None:
    before = answer(server)
    busy = threading.Event()
    with ThreadPoolExecutor(100) as pool:
        clients = [pool.submit(vanish, server, number, busy) for number in range(100)]
        wait_until(lambda: all(gauges(server).values()), PATIENCE, "requests run, and others wait")
        busy.set()
        for client in clients:
            client.result()
    wait_until(lambda: not any(gauges(server).values()), PATIENCE, "no request is left")
    assert answer(server) == before


BROKEN = {
    "not JSON": b"{",
    "nothing": b"",
    "no text": b"\xff\xfe\x00",
    "an array": b"[1]",
    "a number": b"7",
    "a deep array": b'{"model": "m", "prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "a number of 5000 digits": b'{"model": "m", "prompt": "x", "max_tokens": ' + b"9" * 5000 + b"}",
    "no prompt": {"model": "m"},
    "null": asked(prompt=None),
    "no tokens": asked(prompt=[]),
    "an object": asked(prompt={}),
    "tokens of many kinds": asked(prompt=[1, "x", None]),
    "fractions of tokens": asked(prompt=[1.5, 2.5]),
    "a prompt longer than the context": asked(prompt=[7] * (CONTEXT + 1)),
    "a prompt and an answer longer than the context": asked(prompt=[7] * CONTEXT, max_tokens=1),
    "a text of five megabytes": asked(prompt="x y " * (5 << 18)),
    "a negative token": asked(prompt=[5, -1]),
    "a token outside the vocabulary": asked(prompt=[VOCABULARY]),
    "a token of 64 bits": asked(prompt=[1 << 63]),
    "no answer": asked(max_tokens=0),
    "an answer of minus one": asked(max_tokens=-1),
    "an answer of a billion": asked(max_tokens=10**9),
    "an answer in words": asked(max_tokens="many"),
    "more tokens at least than at most": asked(min_tokens=5),
    "a million answers": asked(n=10**6),
    "no answers": asked(n=0),
    "minus one answers": asked(n=-1),
    "a million prompts' worth of logprobs": asked(logprobs=10**6),
    "negative prompt logprobs": asked(prompt_logprobs=-7),
    "a cold temperature": asked(temperature=-1),
    "an endless temperature": b'{"model": "m", "prompt": "x", "temperature": Infinity}',
    "top_p of two": asked(top_p=2),
    "top_k of minus five": asked(top_k=-5),
    "a heavy penalty": asked(frequency_penalty=1e9),
    "10,000 stop tokens outside the vocabulary": asked(stop_token_ids=[1 << 40] * 10_000),
    "an empty stop": asked(stop=[""]),
    "a stop of numbers": asked(stop=[1]),
    "a bias outside the vocabulary": asked(logit_bias={"99999": 1}),
    "a bias by name": asked(logit_bias={"the": 1}),
    "an unbalanced regex": asked(structured_outputs={"regex": "(((("}),
    "a schema of nonsense": asked(structured_outputs={"json": {"type": "nonsense"}}),
    "a grammar of nonsense": asked(structured_outputs={"grammar": "root ::= ("}),
    "two ways of structure": asked(structured_outputs={"regex": "a", "choice": ["b"]}),
    "an unknown model": asked(model="n"),
}
BROKEN_CHATS = {
    "no messages": {"model": "m", "messages": []},
    "messages that are none": {"model": "m", "messages": [7]},
    "no role": {"model": "m", "messages": [{"content": "x"}]},
    "a picture for a blind model": chat(
        [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/x.png"}}]
    ),
    "a conversation longer than the context": chat("word " * 5000),
    "a tool that is none": chat(tools=[{"type": "function"}]),
    "too many top_logprobs": chat(logprobs=True, top_logprobs=10**6),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_completion_is_refused_and_the_engine_lives(server: Server, name: str) -> None:
    assert_refused(server, *post(server, BROKEN[name]))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", BROKEN_CHATS)
def test_a_broken_chat_is_refused_and_the_engine_lives(server: Server, name: str) -> None:
    assert_refused(server, *post(server, BROKEN_CHATS[name], "/v1/chat/completions"))


def assert_refused(server: Server, status: int, body: bytes) -> None:
    assert 400 <= status < 500, (status, body[:500])
    assert b"Traceback" not in body
    answered = json.loads(body)
    # If the body is not JSON, FastAPI answers before vLLM does.
    assert answered.get("detail") or answered["error"]["message"]
    assert answer(server)


@pytest.mark.parametrize(
    "request_", [asked(stop=[f"s{i}" for i in range(10_000)]), asked(stop_token_ids=[5] * 10_000)]
)
def test_a_long_stop_list_is_refused_or_answered(server: Server, request_: dict[str, Any]) -> None:
    status, body = post(server, request_)
    assert status == 200 or 400 <= status < 500, body[:500]
    assert answer(server)


@pytest.mark.parametrize("key", ["", "Bearer ", "Bearer wrong", f"Basic {KEY}", f"Bearer {KEY}x"])
def test_requests_without_the_key_are_refused(server: Server, key: str) -> None:
    headers = JSON | {"Authorization": key}
    assert post(server, asked(), headers=headers)[0] == 401
    assert server.metrics()  # a scraper needs no key


@pytest.mark.parametrize("path", ["/v1/none", "/v1/completions/../../etc/passwd", "//v1", "/"])
def test_other_paths_are_not_found(server: Server, path: str) -> None:
    status, _ = post(server, asked(), path)
    assert 400 <= status < 500
    assert answer(server)


def status_of_an_answer(server: Server, running: threading.Semaphore) -> int | str:
    """Stream an answer. Release `running` at the first token, or when there is none.

    Returns:
        The HTTP status of a whole answer or of a refusal, "not begun" if nothing came at all, else
        what was wrong.
    """
    url = urlsplit(server.url)
    assert url.hostname is not None
    connection = http.client.HTTPConnection(url.hostname, url.port, timeout=PATIENCE)
    request = asked(max_tokens=300, ignore_eos=True, stream=True)
    try:
        try:
            connection.request("POST", "/v1/completions", json.dumps(request), JSON)
            response = connection.getresponse()
        except ConnectionError:
            return "not begun"  # refused, or cut off while the server had not read it
        try:
            begun = response.readline()
            running.release()
            whole = begun + response.read()
        except (OSError, http.client.HTTPException) as error:
            return f"{response.status}, then {type(error).__name__}"
        ended = response.status != 200 or b"data: [DONE]" in whole
        return response.status if ended else f"{response.status}, no end"
    finally:
        running.release()
        connection.close()


def test_sigterm_under_load_finishes_running_requests_and_exits(server: Server) -> None:
    # The engine runs eight sequences at a time: some of the 20 have their first token, some wait.
    running = threading.Semaphore(0)
    with ThreadPoolExecutor(20) as pool:
        answers = [pool.submit(status_of_an_answer, server, running) for _ in range(20)]
        assert running.acquire(timeout=PATIENCE)
        os.kill(server.process.pid, signal.SIGTERM)
        assert server.process.wait(GRACE + PATIENCE) in (0, -signal.SIGTERM, 128 + signal.SIGTERM)
        outcomes = [answer.result(timeout=PATIENCE) for answer in answers]
    assert 200 in outcomes, outcomes
    assert set(outcomes) <= {200, 503, "not begun"}

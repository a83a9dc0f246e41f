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


def post(server: Server, body: bytes | dict[str, Any]) -> tuple[int, bytes]:
    """Status and body of the response to a completion."""
    url = urlsplit(server.url)
    assert url.hostname is not None
    connection = http.client.HTTPConnection(url.hostname, url.port, timeout=PATIENCE)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    try:
        connection.request("POST", "/v1/completions", data, JSON)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def asked(**changes: Any) -> dict[str, Any]:
    return {"model": "m", "prompt": PROMPT, "max_tokens": 4, "temperature": 0} | changes


def gauges(server: Server) -> dict[str, float]:
    """Requests running and waiting, and the share of the KV cache in use."""
    by_name: dict[str, float] = {}
    for line in server.metrics().splitlines():
        sample = re.match(
            r"vllm:(num_requests_running|num_requests_waiting|kv_cache_usage_perc)\{.*\} (\S+)$",
            line,
        )
        if sample:
            by_name[sample[1]] = by_name.get(sample[1], 0.0) + float(sample[2])
    assert len(by_name) == 3
    return by_name


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


# Beside what vLLM's own tests try: requests that would reach the model or its cache.
BROKEN = {
    "no text": b"\xff\xfe\x00",
    "a deep array": b'{"model": "m", "prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "no tokens": asked(prompt=[]),
    "a prompt and an answer longer than the context": asked(prompt=[7] * CONTEXT, max_tokens=1),
    "a text of five megabytes": asked(prompt="x y " * (5 << 18)),
    "a negative token": asked(prompt=[5, -1]),
    "a token outside the vocabulary": asked(prompt=[VOCABULARY]),
    "a token of 64 bits": asked(prompt=[1 << 63]),
    "an answer of a billion": asked(max_tokens=10**9),
    "a million answers": asked(n=10**6),
    "a million prompts' worth of logprobs": asked(logprobs=10**6),
    "a bias outside the vocabulary": asked(logit_bias={"99999": 1}),
    "10,000 stop tokens outside the vocabulary": asked(stop_token_ids=[1 << 40] * 10_000),
    "a grammar of nonsense": asked(structured_outputs={"grammar": "root ::= ("}),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_request_is_refused_and_the_engine_lives(server: Server, name: str) -> None:
    status, body = post(server, BROKEN[name])  # type: ignore[arg-type]
    assert 400 <= status < 500, (status, body[:500])
    assert b"Traceback" not in body
    answered = json.loads(body)
    # If the body is not JSON, FastAPI answers before vLLM does.
    assert answered.get("detail") or answered["error"]["message"]
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

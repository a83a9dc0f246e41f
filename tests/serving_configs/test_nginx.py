"""What the front lets through, what it refuses and how, with the real nginx."""

import contextlib
import http.client
import importlib.util
import json
import re
import socket
import subprocess
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.serving_configs.debian import program
from tests.serving_configs.front import (
    NGINX,
    Upstream,
    nginx,
    upstream,
    written_conf,
)
from tests.support.local_servers import free_port
from tests.support.waiting import PATIENCE, wait_until


@pytest.fixture(scope="module")
def vllm() -> Iterator[Upstream]:
    with upstream() as seen:
        yield seen


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("nginx")


@pytest.fixture(scope="module")
def front(vllm: Upstream, directory: Path) -> Iterator[int]:
    with nginx(directory, local=vllm.port) as port:
        yield port


def answer(
    port: int, method: str, path: str, body: bytes = b"", **headers: str
) -> tuple[int, bytes, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    try:
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        return response.status, response.read(), dict(response.getheaders())
    finally:
        connection.close()


def assert_openai_error(status: int, got: tuple[int, bytes, dict[str, str]]) -> None:
    assert got[0] == status
    assert got[2]["Content-Type"] == "application/json"
    error = json.loads(got[1])["error"]
    assert error["code"] == status
    assert error["message"]


def checked(conf: Path, prefix: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [program("nginx"), "-t", "-c", str(conf), "-p", str(prefix)],
        capture_output=True,
        text=True,
    )


def test_nginx_accepts_the_committed_files_as_they_stand(directory: Path) -> None:
    """As the file itself says to check it: outside of Docker, no name of a server resolves."""
    run = checked(NGINX / "nginx.conf", directory)
    assert run.returncode == 0, run.stderr
    assert "[warn]" not in run.stderr


@pytest.mark.parametrize("servers", ["compose.conf", "canary.conf"])
def test_nginx_accepts_what_takes_the_place_of_the_servers(servers: str, tmp_path: Path) -> None:
    run = checked(written_conf(tmp_path, 8080, servers, vllm=8000, dense=8001), tmp_path)
    assert run.returncode == 0, run.stderr
    assert "[warn]" not in run.stderr


def test_idle_connections_are_closed_before_vllm_closes_them() -> None:
    (seconds,) = re.findall(r"^keepalive_timeout (\d+)s;", (NGINX / "pool.conf").read_text(), re.M)
    spec = importlib.util.find_spec("vllm")  # imports nothing
    if spec is None or spec.origin is None:
        pytest.skip("needs vLLM")
    envs = Path(spec.origin).with_name("envs.py").read_text()
    (limit,) = re.findall(r"VLLM_HTTP_TIMEOUT_KEEP_ALIVE: int = (\d+)", envs)
    assert int(seconds) < int(limit)


def test_of_an_idle_connection_the_front_lets_go_first(front: int, vllm: Upstream) -> None:
    """Else a POST can meet a connection that vLLM is closing, and cannot be sent again."""
    assert answer(front, "POST", "/v1/completions", b"{}")[0] == 200
    assert vllm.closed_by.get(timeout=PATIENCE) == "front"


def test_tokens_come_one_by_one(front: int, vllm: Upstream) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", front, timeout=PATIENCE)
    connection.request("POST", "/v1/one-by-one", b"{}")
    response = connection.getresponse()
    for token in range(3):
        # The next is sent only after this one is here: a front that collects them never answers.
        assert response.read1(1 << 16) == b"data: %d\n\n" % token
        vllm.token_read.release()
    assert response.read1(1 << 16) == b""
    connection.close()


def test_a_client_that_leaves_is_gone_for_vllm_too(front: int, vllm: Upstream) -> None:
    with socket.create_connection(("127.0.0.1", front)) as client:
        client.sendall(b"POST /v1/endless HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}")
        received = b""
        while b"data: 0" not in received:
            piece = client.recv(1 << 16)
            assert piece, received
            received += piece
    assert vllm.client_left.wait(PATIENCE)


@pytest.mark.parametrize("path", ["/metrics", "/docs", "/tokenize", "/", "/v2/x", "/v1/../metrics"])
def test_only_the_api_is_let_through(front: int, vllm: Upstream, path: str) -> None:
    before = len(vllm.requests)
    assert_openai_error(404, answer(front, "GET", path))
    assert len(vllm.requests) == before


def test_health_is_let_through(front: int) -> None:
    assert answer(front, "GET", "/health")[0] == 200


def test_a_large_prompt_passes_whole_and_a_larger_body_is_refused(
    front: int, vllm: Upstream
) -> None:
    large = b"1" * (256 << 10)
    assert answer(front, "POST", "/v1/completions", large)[0] == 200
    assert vllm.requests[-1][2] == large
    before = len(vllm.requests)
    assert_openai_error(413, answer(front, "POST", "/v1/completions", large + b"1"))
    assert len(vllm.requests) == before


def test_a_schema_that_vllm_would_compile_for_minutes_is_refused(
    front: int, vllm: Upstream
) -> None:
    """Of a megabyte: a constant, or 20,000 properties (SECURITY.md)."""
    before = len(vllm.requests)
    for schema in (
        {"const": "x" * (1 << 20)},
        {"properties": {f"p{i}": {"type": "string"} for i in range(20_000)}},
    ):
        asked = {"prompt": "x", "structured_outputs": {"json": schema}}
        body = json.dumps(asked).encode()
        assert_openai_error(413, answer(front, "POST", "/v1/completions", body))
    assert len(vllm.requests) == before


def test_large_headers_are_refused(front: int) -> None:
    big = answer(front, "GET", "/v1/models", Authorization="Bearer " + "x" * 9000)
    assert_openai_error(400, big)
    assert answer(front, "GET", "/v1/models", Authorization="Bearer " + "x" * 7000)[0] == 200


def test_keys_and_ids_reach_vllm_and_neither_keys_nor_prompts_the_log(
    front: int, vllm: Upstream, directory: Path
) -> None:
    answer(front, "POST", "/v1/completions?k=secret", b"a prompt", Authorization="Bearer secret")
    headers = vllm.requests[-1][1]
    assert headers["Authorization"] == "Bearer secret"
    assert headers["X-Forwarded-For"] == "127.0.0.1"
    log = _log_with(directory / "access.log", headers["X-Request-Id"])
    entry = json.loads(log.splitlines()[-1])
    assert entry["id"] == headers["X-Request-Id"]
    assert entry["request"] == "POST /v1/completions"
    assert entry["status"] == 200
    assert "secret" not in log
    assert "a prompt" not in log


def _log_with(path: Path, text: str) -> str:
    """The log once `text` is in it: nginx writes it after the client has its answer."""
    wait_until(lambda: text in path.read_text(), PATIENCE, text)
    return path.read_text()


def test_errors_of_vllm_stay_as_they_are(front: int) -> None:
    status, body, _ = answer(front, "POST", "/v1/refused", b"{}")
    assert (status, body) == (429, b'{"error":{"message":"from vLLM"}}')


def test_half_a_header_is_dropped_and_does_not_reach_vllm(front: int, vllm: Upstream) -> None:
    before = len(vllm.requests)
    # Dropped after 5 s, and not after the 60 s that nginx waits unless it is told otherwise.
    with socket.create_connection(("127.0.0.1", front), timeout=50) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n")
        received = b""
        try:
            while piece := client.recv(4096):  # kept open by no one: nginx ends it
                received += piece
        except ConnectionResetError:
            pass
    assert received == b"" or b" 408 " in received
    assert len(vllm.requests) == before


def test_without_a_server_the_answer_is_503_and_soon(tmp_path: Path) -> None:
    with nginx(tmp_path, local=free_port()) as port:
        for method, path in (("POST", "/v1/completions"), ("GET", "/health")):
            got = answer(port, method, path)
            assert_openai_error(503, got)
            assert got[2]["Retry-After"] == "5"


def test_a_server_that_takes_no_connection_costs_no_request(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        deaf = stack.enter_context(socket.socket())
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)
        for _ in range(4):  # its queue is full: from now on it is as a machine that is gone
            waits = stack.enter_context(socket.socket())
            waits.setblocking(False)
            waits.connect_ex(deaf.getsockname())
        dense = stack.enter_context(upstream())
        ports = {"vllm": deaf.getsockname()[1], "dense": dense.port}
        port = stack.enter_context(nginx(tmp_path, "canary.conf", **ports))
        assert {answer(port, "POST", "/v1/x", b"{}")[0] for _ in range(100)} == {200}
        assert '"group":"gac"' in _log_with(tmp_path / "access.log", '"group":"gac"')
    assert len(dense.requests) == 100


def test_a_server_that_hangs_gets_half_of_what_is_open_and_no_more(tmp_path: Path) -> None:
    clients, requests = 12, 200
    with (
        upstream() as sound,
        # As of a process that is stopped: the kernel takes connections, and nobody answers.
        socket.create_server(("127.0.0.1", 0), backlog=clients) as hangs,
        nginx(tmp_path, workers="16", local=sound.port, beside=hangs.getsockname()[1]) as port,
        ThreadPoolExecutor(clients) as pool,
    ):
        asked = [pool.submit(answer, port, "POST", "/v1/x", b"{}") for _ in range(requests)]
        least = requests - clients // 2
        wait_until(lambda: sum(map(Future.done, asked)) >= least, PATIENCE, f"{least} answers")
        hangs.close()  # it is restarted
        statuses = Counter(one.result()[0] for one in asked)
    assert statuses.keys() == {200, 503}
    assert statuses[503] <= clients // 2


def test_a_flood_from_one_address_is_429(vllm: Upstream, tmp_path: Path) -> None:
    # After a burst of 100, one a minute.
    with nginx(tmp_path, rate="1r/m", local=vllm.port) as port:

        def ask(_: int) -> list[tuple[int, bytes, dict[str, str]]]:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
            got = []
            for _ in range(20):
                connection.request("GET", "/v1/models")
                response = connection.getresponse()
                got.append((response.status, response.read(), dict(response.getheaders())))
            connection.close()
            return got

        with ThreadPoolExecutor(8) as pool:
            answers = [one for some in pool.map(ask, range(8)) for one in some]
    passed = [one for one in answers if one[0] == 200]
    refused = [one for one in answers if one[0] != 200]
    assert len(passed) > 100
    assert refused
    for one in refused:
        assert_openai_error(429, one)
        assert one[2]["Retry-After"] == "1"


@pytest.fixture(scope="module")
def canary(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, Upstream, Upstream]]:
    """A front that splits, and the stand-ins for the compressed and for the dense server."""
    with upstream() as gac, upstream() as dense:
        directory = tmp_path_factory.mktemp("canary")
        with nginx(directory, "canary.conf", vllm=gac.port, dense=dense.port) as port:
            yield port, gac, dense


def many(port: int, headers: list[dict[str, str]]) -> list[int]:
    """The statuses of GETs over one connection, one for each of `headers`."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
    statuses = []
    for one in headers:
        connection.request("GET", "/v1/models", headers=one)
        response = connection.getresponse()
        response.read()
        statuses.append(response.status)
    connection.close()
    return statuses


def test_a_canary_gets_its_share_of_requests(canary: tuple[int, Upstream, Upstream]) -> None:
    port, gac, dense = canary
    before = len(gac.requests), len(dense.requests)
    assert set(many(port, [{}] * 120)) == {200}
    drawn = len(gac.requests) - before[0], len(dense.requests) - before[1]
    assert sum(drawn) == 120
    assert 1 <= drawn[0] <= 30  # of 120 at 10 %: outside of this three times in a million


def test_a_session_stays_with_one_side_and_sessions_go_to_both(
    canary: tuple[int, Upstream, Upstream],
) -> None:
    port, gac, dense = canary
    before = len(gac.requests), len(dense.requests)
    sessions = [f"session {number}" for number in range(60)]
    assert set(many(port, [{"X-Session-Id": name} for name in sessions for _ in range(2)])) == {200}
    sides = [
        {headers["X-Session-Id"] for _, headers, _ in side.requests[old:]}
        for side, old in zip((gac, dense), before, strict=True)
    ]
    assert sides[0].isdisjoint(sides[1])
    assert sides[0] | sides[1] == set(sessions)
    assert 0 < len(sides[0]) < len(sides[1])


def test_a_canary_that_is_down_costs_no_request(tmp_path: Path) -> None:
    with (
        upstream() as dense,
        nginx(tmp_path, "canary.conf", vllm=free_port(), dense=dense.port) as port,
    ):
        assert set(many(port, [{}] * 100)) == {200}
        assert len(dense.requests) == 100
        log = _log_with(tmp_path / "access.log", '"group":"gac"')
        assert {json.loads(line)["group"] for line in log.splitlines()} == {"gac", "dense"}

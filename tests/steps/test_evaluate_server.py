"""`evaluate --server` adds up correct answers, and reports each invalid one in one line."""

import contextlib
import json
import math
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import error, result, usage
from tests.support.dense_models import write_text, write_tokenizer
from tests.support.local_servers import answering, free_port
from vllm_gac.texts.token_text import windows


def logprob(before: int, token: int) -> float:
    """The logprob of `token` after `before` by the server below. It may be any function of both."""
    return -((7 * before + token) % 50) / 10


class Fake(ThreadingHTTPServer):
    """A completions API with that model. Tests replace `respond` to break it."""

    models: tuple[dict[str, Any], ...] = ({"id": "m", "max_model_len": 101},)
    url: str

    def respond(self, request: dict[str, Any]) -> tuple[int, Any]:
        assert request["echo"] is True
        assert len(request["prompt"]) <= 8  # servers bound them
        choices = []
        for index, prompt in enumerate(request["prompt"]):
            pairs = zip(prompt, [*prompt[1:], 0], strict=True)  # it generates a 0
            logprobs = [None, *(logprob(*pair) for pair in pairs)]
            choices.append({"index": index, "logprobs": {"token_logprobs": logprobs}})
        return 200, {"choices": choices[::-1]}


class _Handler(BaseHTTPRequestHandler):
    server: Fake

    def do_GET(self) -> None:
        assert self.path == "/v1/models"
        self._send(200, {"data": self.server.models})

    def do_POST(self) -> None:
        assert self.path == "/v1/completions"
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self._send(*self.server.respond(json.loads(body)))

    def _send(self, status: int, answer: Any) -> None:
        body = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def fake() -> Iterator[Fake]:
    server = Fake(("127.0.0.1", 0), _Handler)
    with answering(server) as address:
        server.url = f"http://{address}"
        yield server


@pytest.fixture
def arguments(fake: Fake, tmp_path: Path) -> list[object]:
    """A command line for `fake`. The last window of its text is short."""
    write_tokenizer(tmp_path / "tokenizer.json", 128)
    text = write_text(tmp_path / "text", 12_345)
    server = ["--server", fake.url, "--sequence-length", 100, "--quiet"]
    return ["evaluate", tmp_path, "--text", text, *server]


def test_is_the_exponential_of_the_mean_over_all_windows(
    arguments: list[object], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = windows(tmp_path, [tmp_path / "text"], length=100, max_tokens=None)
    losses = [
        -logprob(*pair) for part in parts for window in part.tolist() for pair in pairwise(window)
    ]
    got = result(capsys, *arguments)
    assert got["tokens"] == len(losses) == 12_345 - 124
    assert got["perplexity"] == pytest.approx(math.exp(sum(losses) / len(losses)))


def test_the_model_is_the_only_one_or_named(
    fake: Fake, arguments: list[object], capsys: pytest.CaptureFixture[str]
) -> None:
    fake.models = ({"id": "a"}, {"id": "b"})  # other servers than vLLM do not report their context
    assert error(capsys, *arguments) == f"{fake.url}/v1: serves a, b; choose by --served-model-name"
    asked = []
    respond = fake.respond
    fake.respond = lambda request: asked.append(request["model"]) or respond(request)
    result(capsys, *arguments, "--served-model-name", "b")
    assert set(asked) == {"b"}
    said = error(capsys, *arguments, "--served-model-name", "c")
    assert said == f"{fake.url}/v1: --served-model-name c: no such model; it serves a, b"


def test_a_window_must_leave_room_for_the_token_that_is_generated(
    fake: Fake, arguments: list[object], capsys: pytest.CaptureFixture[str]
) -> None:
    said = error(capsys, *arguments, "--sequence-length", 101)
    assert "m has a context of 101 tokens" in said
    assert said.endswith("use --sequence-length 100, or less")


@pytest.mark.parametrize(
    ("status", "answer", "message"),
    [
        (400, {"error": {"message": "Token id 99 is out of vocabulary"}}, "Token id 99"),
        (401, {"error": {"message": "Unauthorized"}}, "set OPENAI_API_KEY"),
        (404, {"detail": "Not Found"}, "/v1/completions: Error code: 404"),
        (200, {"choices": [{"index": 0}]}, "does not support 'echo' with 'logprobs'"),
        (200, {"choices": [{"logprobs": {"token_logprobs": [-1.0]}}]}, "does not support 'echo'"),
        (200, {"text": "hello"}, "not an answer of an OpenAI-compatible server"),
        (200, "hello", "not an answer of an OpenAI-compatible server"),
    ],
)
def test_a_server_that_cannot_say_is_one_line(
    fake: Fake,
    arguments: list[object],
    capsys: pytest.CaptureFixture[str],
    status: int,
    answer: Any,
    message: str,
) -> None:
    fake.respond = lambda request: (status, answer)
    said = error(capsys, *arguments)
    assert said.startswith(f"{fake.url}/v1")
    assert message in said


def _answer_with(logprob: float | None, fake: Fake) -> None:
    """Let one token of each answer have this log probability."""
    respond = fake.respond

    def changed(request: dict[str, Any]) -> tuple[int, Any]:
        status, answer = respond(request)
        answer["choices"][0]["logprobs"]["token_logprobs"][5] = logprob
        return status, answer

    fake.respond = changed


@pytest.mark.parametrize("bad", [None, math.nan, -math.inf])
def test_a_server_whose_model_is_broken_is_an_error(
    fake: Fake, arguments: list[object], capsys: pytest.CaptureFixture[str], bad: float | None
) -> None:
    _answer_with(bad, fake)
    expected = "inf" if bad == -math.inf else "nan"
    assert f"{fake.url}/v1: perplexity is {expected}" in error(capsys, *arguments)


def test_no_server_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"http://127.0.0.1:{free_port()}/v1"
    said = error(capsys, "evaluate", tmp_path, "--text", "t", "--server", url)
    assert said.startswith(f"{url}: no answer (")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--server", "localhost:8000"], "'localhost:8000' is not the URL of a server"),
        (["--server", "http://localhost:99999"], "is not the URL of a server"),
        (["--server", "http://a", "--engine", "vllm"], "not allowed with argument --server"),
        (["--served-model-name", "m"], "has no effect without --server"),
        (
            ["--quantization", "fp8_per_tensor"],
            "--quantization has no effect without --engine vllm",
        ),
        (["--server", "http://a", "--kv-cache-dtype", "fp8"], "--kv-cache-dtype has no effect"),
        (["--against-revision", "v1"], "--against-revision has no effect without --against"),
        (["--engine", "vllm", "--device", "cuda"], "--device is the reference's"),
        (["--server", "http://a", "--device", "cuda"], "--device is the reference's"),
    ],
)
def test_flags_that_do_not_go_together(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in usage(capsys, "evaluate", "d", "--text", "t", *flags)


@pytest.mark.parametrize("status", [200, 400])
def test_an_answer_without_end_is_not_read(
    fake: Fake,
    arguments: list[object],
    capsys: pytest.CaptureFixture[str],
    status: int,
) -> None:
    """The server sends 1 GB. It is cut off after what could have been asked for."""
    sent = []

    def endless(handler: _Handler) -> None:
        handler.send_response(status)
        handler.end_headers()
        with contextlib.suppress(OSError):
            for _ in range(1 << 10):
                sent.append(handler.wfile.write(b" " * (1 << 20)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Handler, "do_POST", endless)
        said = error(capsys, *arguments)
    assert "an answer of more than " in said if status == 200 else "Error code: 400" in said
    assert sum(sent) < 100 << 20


@pytest.mark.parametrize(("logprob", "refused"), [(0.009, False), (0.011, True), (1e308, True)])
def test_what_is_no_log_probability_is_refused(
    fake: Fake,
    arguments: list[object],
    capsys: pytest.CaptureFixture[str],
    logprob: float,
    refused: bool,
) -> None:
    _answer_with(logprob, fake)
    if refused:
        said = error(capsys, *arguments)
        assert said.startswith(f"{fake.url}/v1: returns {logprob:g} as a log probability")
        assert "--logprobs-mode raw_logprobs" in said
    else:
        assert result(capsys, *arguments)["perplexity"] > 1


def test_a_busy_server_is_asked_again(
    fake: Fake,
    arguments: list[object],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: None)
    asked = []
    respond = fake.respond
    fake.respond = lambda request: (
        (503, "busy") if asked.append(1) or len(asked) % 3 else respond(request)
    )
    assert result(capsys, *arguments)["perplexity"] > 1
    fake.respond = lambda request: (503, "busy")
    assert error(capsys, *arguments).endswith('/completions: Error code: 503 - "busy"')


def test_brackets_without_end_are_no_answer(
    fake: Fake,
    arguments: list[object],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(json, "dumps", lambda _: "[" * 100_000)
    assert "not an answer of an OpenAI-compatible server" in error(capsys, *arguments)

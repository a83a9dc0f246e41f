"""What clients of one server get: streamed chat, schemas, refusals, and SIGTERM, which comes last.

Its layers all differ, and it has a key.
"""

import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.serving.models import HETEROGENEOUS, write_model
from tests.serving.server import Server, serve
from tests.support.waiting import PATIENCE

pytestmark = pytest.mark.slow

KEY = "correct horse"
CONTEXT, VOCABULARY = 512, 4096
CHAT: dict[str, Any] = {
    "model": "m",
    "messages": [{"role": "user", "content": "def put(self, item):"}],
    "max_completion_tokens": 60,
    "temperature": 0,
}
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}, "is_ripe": {"type": "boolean"}},
    "required": ["colour", "is_ripe"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    root = tmp_path_factory.mktemp("api")
    write_model(root / "model", HETEROGENEOUS[:4])
    # Random weights might fill an answer with whitespace.
    schemas = (
        "--structured-outputs-config",
        '{"backend": "xgrammar", "disable_any_whitespace": true}',
    )
    flags = ("--served-model-name", "m", "--api-key", KEY, "--shutdown-timeout", str(int(PATIENCE)))
    with serve(root / "model", root / "log", *flags, *schemas) as running:
        yield running


@pytest.fixture
def client(server: Server) -> openai.OpenAI:
    return server.client().with_options(api_key=KEY)


def test_a_streamed_chat_has_the_tokens_of_one_that_is_not(client: openai.OpenAI) -> None:
    complete = client.chat.completions.create(**CHAT)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = client.chat.completions.create(**CHAT, **options)
    parts = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert sum(map(bool, parts)) > 10
    assert "".join(parts) == complete.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == complete.choices[0].finish_reason
    assert last.usage == complete.usage


def test_an_answer_follows_its_json_schema(client: openai.OpenAI) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "fruit", "schema": SCHEMA}}
    answer = client.chat.completions.create(**CHAT, response_format=form).choices[0]
    assert answer.finish_reason == "stop"
    fruit = json.loads(str(answer.message.content))
    assert fruit.keys() == {"colour", "is_ripe"}
    assert fruit["colour"] in ("red", "green")


@pytest.mark.parametrize(
    "request_",
    [
        {"prompt": [VOCABULARY]},
        {"prompt": [5, -1]},
        {"prompt": [7] * CONTEXT, "max_tokens": 1},
        {"prompt": [5], "extra_body": {"structured_outputs": {"grammar": "root ::= ("}}},
    ],
    ids=["token", "negative token", "context", "grammar"],
)
def test_a_request_beyond_the_model_is_refused_and_the_next_one_answered(
    client: openai.OpenAI, request_: dict[str, Any]
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="m", **request_)
    assert "Traceback" not in str(refused.value)
    assert client.completions.create(model="m", prompt=[5], max_tokens=2).choices[0].text


def test_a_request_without_the_key_is_refused(server: Server) -> None:
    with pytest.raises(openai.AuthenticationError):
        server.client().completions.create(model="m", prompt=[5])


def test_sigterm_lets_a_running_answer_finish(server: Server, client: openai.OpenAI) -> None:
    long = {"max_tokens": 300, "stream": True, "extra_body": {"ignore_eos": True}}
    chunks = iter(client.completions.create(model="m", prompt=[5], **long))
    next(chunks)
    os.kill(server.process.pid, signal.SIGTERM)
    *_, last = chunks
    assert last.choices[0].finish_reason == "length"
    assert server.process.wait(PATIENCE) in (0, -signal.SIGTERM, 128 + signal.SIGTERM)

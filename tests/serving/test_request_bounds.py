"""One request may not ask for all that a server can do."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="comes with vLLM")

from fastapi import FastAPI, HTTPException
from fastapi.testclient import TestClient

from vllm_gac.serving.request_bounds import (
    BODY_BYTES,
    GRAMMAR_BYTES,
    SCHEMA_BYTES,
    RequestBounds,
    refused,
)

MAX_SEQUENCES = 8
LARGE = "x" * SCHEMA_BYTES


def asked(**body: Any) -> bytes:
    return json.dumps(body).encode()


@pytest.mark.parametrize(
    ("body", "sequences"),
    [
        ({"prompt": ["x"] * 9}, "9 sequences (prompts: 9, n: 1)"),
        ({"prompt": [[1, 2]] * 9}, "9 sequences (prompts: 9, n: 1)"),
        ({"prompt": ["x"] * 5, "prompt_embeds": ["x"] * 4}, "9 sequences (prompts: 9, n: 1)"),
        ({"prompt": ["x"] * 3, "n": 3}, "9 sequences (prompts: 3, n: 3)"),
        ({"messages": [{"role": "user"}], "n": "9"}, "9 sequences (prompts: 1, n: 9)"),
        ({"messages": [[{"role": "user"}]] * 9}, "9 sequences (prompts: 9, n: 1)"),
        ({"token_ids": [1], "sampling_params": {"n": 9.0}}, "9 sequences (prompts: 1, n: 9)"),
        ({"query": "x", "items": [[1]] * 9}, "9 sequences (prompts: 9, n: 1)"),
    ],
)
def test_more_sequences_than_half_a_batch_are_refused(body: dict[str, Any], sequences: str) -> None:
    assert refused(asked(**body), MAX_SEQUENCES) == (
        f"The request asks for {sequences}, and one request may have 8: send several requests."
    )


@pytest.mark.parametrize(
    ("body", "sequences"),
    [
        ({"prompt": [[7] * 51] * 2}, 2),
        ({"prompt": ["x" * 51, "y" * 51]}, 2),
        ({"prompt": [7] * 51, "n": 2}, 2),
        ({"messages": [{"role": "user", "content": "x" * 30}], "n": 3}, 3),
        ({"token_ids": [7] * 51, "sampling_params": {"n": 2}}, 2),
    ],
)
def test_several_sequences_do_not_get_the_whole_queue_of_tokens(
    body: dict[str, Any], sequences: int
) -> None:
    refusal = refused(asked(**body), MAX_SEQUENCES, 100)
    assert refusal is not None
    assert f"{sequences} sequences have 102 characters or token ids" in refusal
    assert refused(asked(**body), MAX_SEQUENCES, 102) is None
    assert refused(asked(**body), MAX_SEQUENCES) is None


def test_one_sequence_is_bounded_by_the_context_alone() -> None:
    assert refused(asked(prompt=[7] * 101), MAX_SEQUENCES, 100) is None


GRAMMAR = "x" * GRAMMAR_BYTES


@pytest.mark.parametrize(
    ("body", "most"),
    [
        ({"response_format": {"json_schema": {"schema": {"const": LARGE}}}}, "65,536"),
        ({"structured_outputs": {"choice": ["x" * 100] * (SCHEMA_BYTES // 100)}}, "65,536"),
        ({"tools": [{"function": {"parameters": {"const": LARGE}}}]}, "65,536"),
        ({"text": {"format": {"schema": {"const": LARGE}}}}, "65,536"),
        ({"output_config": {"format": {"schema": {"const": LARGE}}}}, "65,536"),
        ({"sampling_params": {"structured_outputs": {"regex": LARGE}}}, "65,536"),
        ({"structured_outputs": {"grammar": GRAMMAR}}, "16,384"),
        ({"structured_outputs": {"structural_tag": GRAMMAR}}, "16,384"),
        ({"response_format": {"type": "structural_tag", "format": GRAMMAR}}, "16,384"),
        ({"sampling_params": {"structured_outputs": {"grammar": GRAMMAR}}}, "16,384"),
    ],
)
def test_large_schemas_are_refused_wherever_they_stand_and_grammars_sooner(
    body: dict[str, Any], most: str
) -> None:
    refusal = refused(asked(prompt="x", **body), MAX_SEQUENCES)
    assert refusal is not None
    assert f"one request may have {most}: simplify them" in refusal


MANY = {"type": "object", "properties": {"a": {"pattern": "a{1,9999}"}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": MANY}}


@pytest.mark.parametrize(
    ("body", "is_refused"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": MANY}}}, True),
        ({"text": {"format": {"type": "json_schema", "schema": MANY}}}, True),
        ({"sampling_params": {"structured_outputs": {"json": json.dumps(MANY)}}}, True),
        ({"tools": [TOOL], "tool_choice": "required"}, True),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}}, True),
        ({"tools": [TOOL | {"function": {"parameters": MANY, "strict": True}}]}, True),
        ({"tools": [TOOL, 7], "tool_choice": "auto"}, False),
        ({"tools": "many"}, False),
    ],
)
def test_repeats_are_refused_where_answers_must_follow_them(
    body: dict[str, Any], is_refused: bool
) -> None:
    refusal = refused(asked(prompt="x", **body), MAX_SEQUENCES)
    assert (refusal is not None and "9,999 times" in refusal) == is_refused


@pytest.mark.parametrize(
    "body",
    [
        asked(prompt=[1] * 5000, n=8),
        asked(prompt=["x"] * 8),
        asked(prompt=LARGE * 3),
        asked(messages=[{"role": "user", "content": LARGE}] * 20, n=None),
        asked(prompt="x", n="many"),
        asked(prompt="x", structured_outputs={"json": "x" * (SCHEMA_BYTES - 100)}),
        asked(prompt="x", structured_outputs={"grammar": "x" * (GRAMMAR_BYTES - 100)}),
        b"",
        b"[" * 100_000,
        b'["x", "x"]',
        b'{"prompt": ["x", "x"',
    ],
    ids=range(11),
)
def test_the_rest_is_left_to_vllm(body: bytes) -> None:
    assert refused(body, MAX_SEQUENCES) is None


@pytest.fixture(scope="module")
def client() -> TestClient:
    """An application that reads bodies as vLLM's does."""
    app = FastAPI()
    scheduler = SimpleNamespace(max_num_seqs=2 * MAX_SEQUENCES, max_num_queued_tokens=1 << 21)
    app.state.vllm_config = SimpleNamespace(scheduler_config=scheduler)
    app.add_middleware(RequestBounds)

    @app.post("/v1/completions")
    @app.post("/v1/embeddings")
    async def echo(body: dict[str, Any]) -> dict[str, Any]:
        return body

    return TestClient(app)


def test_what_is_within_bounds_arrives_as_it_was_sent(client: TestClient) -> None:
    body = {"prompt": ["ä" * 100_000] * MAX_SEQUENCES}
    assert client.post("/v1/completions", json=body).json() == body
    # In pieces, as a slow client sends it.
    sent = json.dumps(body).encode()
    pieces = (sent[at : at + 999] for at in range(0, len(sent), 999))
    headers = {"Content-Type": "application/json"}
    assert client.post("/v1/completions", content=pieces, headers=headers).json() == body


def test_what_is_not_is_answered_with_400(client: TestClient) -> None:
    answer = client.post("/v1/completions", json={"prompt": ["x"] * (MAX_SEQUENCES + 1)})
    assert answer.status_code == 400
    assert "one request may have 8" in answer.text
    answer = client.post("/v1/completions", json={"prompt": ["x" * (1 << 20), "y"]})
    assert answer.status_code == 400
    assert "may have 1,048,576: send several" in answer.text


def test_other_routes_are_left_alone(client: TestClient) -> None:
    assert client.post("/v1/embeddings", json={"prompt": ["x"] * 100}).status_code == 200


def test_a_body_without_end_is_not_read_to_its_end() -> None:
    read = 0

    async def endless() -> dict[str, Any]:
        nonlocal read
        read += 1 << 20
        return {"type": "http.request", "body": b"x" * (1 << 20), "more_body": True}

    async def reads(scope: Any, receive: Any, send: Any) -> None:
        await receive()

    async def sent(message: Any) -> None:
        raise AssertionError(message)

    scope = {"type": "http", "path": "/v1/completions"}
    with pytest.raises(HTTPException) as error:
        asyncio.run(RequestBounds(reads)(scope, endless, sent))
    assert error.value.status_code == 413
    assert read == BODY_BYTES + (1 << 20)

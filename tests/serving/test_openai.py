"""The demo model, compressed by the command line and served by two API servers."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serving.server import Server, serve
from vllm_gac.checkpoint.open import open_checkpoint

pytestmark = pytest.mark.slow

PROMPT = 'def read_lines(path):\n    """Return the lines of a file."""\n'


@pytest.fixture(scope="module")
def server(compressed_demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("server") / "log"
    flags = ("--load-format", "gac", "--api-server-count", "2")
    with serve(compressed_demo, log, *flags) as running:
        yield running


def test_a_completion_is_python(server: Server) -> None:
    answer = server.client().completions.create(
        model=server.model, prompt=PROMPT, max_tokens=60, temperature=0
    )
    code = PROMPT + answer.choices[0].text
    lines = code.rsplit("\n", 1)[0].splitlines()
    assert any(_parses("\n".join(lines[:end])) for end in range(3, len(lines) + 1)), code
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 60


def _parses(code: str) -> bool:
    try:
        return bool(ast.parse(code).body)
    except SyntaxError:
        return False


def test_streaming_gives_the_same_text(server: Server) -> None:
    request = {"model": server.model, "prompt": PROMPT, "max_tokens": 40, "temperature": 0}
    client = server.client()
    whole = client.completions.create(**request)
    pieces = list(
        client.completions.create(**request, stream=True, stream_options={"include_usage": True})
    )
    texts = [chunk.choices[0].text for chunk in pieces if chunk.choices]
    assert len(texts) > 10
    assert "".join(texts) == whole.choices[0].text
    assert pieces[-1].usage == whole.usage


def test_chat_completions_answer_with_and_without_streaming(server: Server) -> None:
    request = {
        "model": server.model,
        "messages": [{"role": "user", "content": "A function that adds two numbers"}],
        "max_tokens": 24,
        "temperature": 0,
    }
    client = server.client()
    whole = client.chat.completions.create(**request).choices[0].message.content
    chunks = client.chat.completions.create(**request, stream=True)
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert whole
    assert streamed == whole


def test_both_api_servers_publish_the_layout_as_metrics(
    server: Server, compressed_demo: Path
) -> None:
    layout = open_checkpoint(compressed_demo).layout
    values = {
        line.split("{")[0]: float(line.split()[-1])
        for line in server.metrics().splitlines()
        if line.startswith("gac_")
    }
    assert values["gac_kv_token_bytes"] == 2 * layout.kv_elements
    assert values["gac_dense_kv_token_bytes"] == 2 * 4 * 2 * 4 * 128
    assert values["gac_parameters"] == layout.parameters
    assert values["gac_aligned_dims_ratio"] == 1.0
    assert values["gac_model_info"] == 1
    log = server.log.read_text()
    assert log.count("ApiServer_") > 1, "only one API server ran"
    assert log.count("bytes of KV cache per token") == 1, "one of them says it in its log"

"""Texts: plain files, and rows with a text or a conversation."""

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import dense_models
from vllm_gac import demo
from vllm_gac.errors import CheckpointError
from vllm_gac.texts.text_files import blocks
from vllm_gac.texts.tokenizer import ModelTokenizer

TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
ROWS = '{"text": "one", "id": 1}\n\n{"text": ""}\n{"text": null}\n{"text": "two\\n"}\n'


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    dense_models.write_tokenizer(directory / "tokenizer.json", 128)
    return directory


def lines(tmp_path: Path, *rows: Any) -> Path:
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def texts(model: Path, path: Path) -> list[tuple[str, bool]]:
    blocks_read = blocks(ModelTokenizer(model), path)
    return [(block.text, block.begins) for block in blocks_read]


def with_template(model: Path, template: str) -> Path:
    raw = {"chat_template": template, "bos_token": "<s>"}
    (model / "tokenizer_config.json").write_text(json.dumps(raw))
    return model


@pytest.mark.parametrize("line", ['{"text": "not a line of .jsonl"}', "words"])
def test_plain_text_is_as_it_stands_and_lines_of_json_are_told(
    line: str, model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "a.txt"
    path.write_text(line + "\n" + line + "\n")
    assert texts(model, path) == [(path.read_text(), True)]
    assert [str(path) in said for said in caplog.messages] == [True] * line.startswith("{")


def test_long_text_is_read_in_blocks_that_end_with_a_line(model: Path) -> None:
    blocks_read = texts(model, demo.CALIBRATION)
    assert "".join(text for text, _ in blocks_read) == demo.CALIBRATION.read_text()
    assert [begins for _, begins in blocks_read] == [True] + [False] * (len(blocks_read) - 1)
    assert all(text.endswith("\n") for text, _ in blocks_read)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "c4-train.0-of-9.json.gz", "A.JSONL.GZ"])
def test_each_row_is_a_document(name: str, model: Path, tmp_path: Path) -> None:
    path, raw = tmp_path / name, ROWS.encode()
    path.write_bytes(gzip.compress(raw) if name.lower().endswith(".gz") else raw)
    assert texts(model, path) == [("one", True), ("two\n", True)]


@pytest.mark.needs("datasets")
def test_rows_of_parquet_are_read_by_their_column(model: Path, tmp_path: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    path = tmp_path / "train.parquet"
    parquet.write_table(pyarrow.table({"id": [1, 2, 3], "text": ["one", None, "two"]}), path)
    assert texts(model, path) == [("one", True), ("two", True)]
    parquet.write_table(pyarrow.table({"messages": [CHAT], "id": [1]}), path)
    assert texts(with_template(model, TEMPLATE), path) == [("<s>user: hi\nassistant: ho\n", False)]
    parquet.write_table(pyarrow.table({"id": [1, 2]}), path)
    with pytest.raises(CheckpointError, match=r"train\.parquet: .*has id"):
        texts(model, path)
    path.write_bytes(b"PAR1 but not really PAR1")
    with pytest.raises(CheckpointError, match=r"train\.parquet: "):
        texts(model, path)


def test_tables_need_the_extra(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    (path := tmp_path / "train.parquet").touch()
    with pytest.raises(CheckpointError, match=r"pip install 'vllm-gac\[datasets\]'"):
        texts(model, path)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_a_byte_order_mark_is_no_text(name: str, model: Path, tmp_path: Path) -> None:
    path, text = tmp_path / name, "words"
    path.write_text(text if name == "a.txt" else json.dumps({"text": text}), encoding="utf-8-sig")
    assert texts(model, path) == [(text, True)]
    path.write_text(text, encoding="utf-16")
    with pytest.raises(CheckpointError, match=f"{path}:"):
        texts(model, path)


# What is in a row, and what is wrong with it.
BAD_ROWS: dict[str, Any] = {
    "neither": {"content": "x"},
    "a number": {"text": 3},
    "a list": ["x"],
    "half a character": {"text": "x\ud83d"},
    "messages that are none": {"messages": "x"},
    "a message that is none": {"messages": ["x"]},
    "no messages": {"messages": []},
    "tools that are none": {"messages": CHAT, "tools": "search"},
    "a role that the template refuses": {"messages": [{"role": "bad", "content": "x"}]},
    "a content of parts": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    },
    "a content that is null": {"messages": [{"role": "user", "content": None}]},
    "a content that is an object": {"messages": [{"role": "user", "content": {"text": "hi"}}]},
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_invalid_rows_are_named(case: str, model: Path, tmp_path: Path) -> None:
    with_template(
        model,
        "{% for m in messages %}{% if m.role == 'bad' %}{{ raise_exception('no such role') }}"
        "{% endif %}{{ m.content | trim }}{% endfor %}{{ 1 / messages|length }}",
    )
    path = lines(tmp_path, {"text": "x"}, BAD_ROWS[case])
    with pytest.raises(CheckpointError, match=rf"{path}:2: "):
        texts(model, path)


PACKED = gzip.compress(ROWS.encode() * 50)
HALF = len(PACKED) // 2
# By case: the name of a file, what it holds, and what the message names behind it.
BAD_FILES: dict[str, tuple[str, bytes, str]] = {
    "no JSON": ("a.jsonl", b'{"text": "x"}\nno JSON', ":2: "),
    "deep JSON": ("a.jsonl", b'{"text": "x"}\n' + b"[" * 99999, ":2: "),
    "no UTF-8": ("a.jsonl", b'{"text": "x"}\n{"text": "\xff"}', ":2: "),
    "cut": ("a.json.gz", PACKED[:-9], ": "),
    "changed": ("a.json.gz", PACKED[:HALF] + b"\0\xff\0" + PACKED[HALF + 3 :], ": "),
    "not gzipped": ("a.json.gz", ROWS.encode(), ": "),
    **{name: (name, b"x" * 9999, ": ") for name in ("data.json", "text.txt.gz", "text.zst")},
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_invalid_files_are_named(case: str, model: Path, tmp_path: Path) -> None:
    name, contents, where = BAD_FILES[case]
    (tmp_path / name).write_bytes(contents)
    with pytest.raises(CheckpointError, match=f"{tmp_path / name}{where}"):
        texts(model, tmp_path / name)


# ---- conversations ---------------------------------------------------------------------------

# As templates of several families ask for parts, tools and null.
TOOLS = """
{%- for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}
{%- for m in messages %}{{ m.role }}: {% if 'tool_calls' in m %}
{%- for call in m.tool_calls %}{{ call.function.name }}{{ call.function.arguments | tojson }}
{%- endfor %}{% elif m.content is none %}nothing{% elif m.content is string %}{{ m.content }}
{%- else %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}{{ '\n' }}
{%- endfor %}"""
CALL = {"function": {"name": "find", "arguments": {"key": "a", "limit": None}}}


@pytest.mark.parametrize(
    ("row", "text"),
    [
        ({"messages": CHAT}, "user: hi\nassistant: ho\n"),
        (
            {"messages": [{"role": "user", "content": [{"text": "h"}, {"text": "i"}]}]},
            "user: hi\n",
        ),
        ({"messages": [{"role": "assistant", "content": None}]}, "assistant: nothing\n"),
        (
            {
                "messages": [{"role": "assistant", "content": None, "tool_calls": [CALL]}],
                "tools": [{"function": {"name": "find"}}],
            },
            '[find]assistant: find{"key": "a"}\n',
        ),
        # A table has nulls where a row has no such key.
        (
            {"messages": [CHAT[0] | {"tool_calls": None, "name": None}], "tools": None},
            "user: hi\n",
        ),
    ],
)
def test_conversations_are_what_the_template_makes_of_them(
    row: dict[str, Any], text: str, model: Path, tmp_path: Path
) -> None:
    with_template(model, TOOLS)
    assert texts(model, lines(tmp_path, row, {"text": "x"})) == [(text, False), ("x", True)]


def test_messages_need_a_template(model: Path, tmp_path: Path) -> None:
    path = lines(tmp_path, {"messages": CHAT})
    with pytest.raises(CheckpointError, match=rf"{path}:1: .*{model}"):
        texts(model, path)


def test_a_template_that_never_ends_is_refused(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_gac.texts.tokenizer._SECONDS", 0.1)
    often = "{% for i in range(99999) %}"
    with_template(model, 4 * often + 4 * "{% endfor %}")
    path = lines(tmp_path, {"messages": CHAT})
    with pytest.raises(CheckpointError, match=rf"{path}:1: .* 0\.1 s"):
        texts(model, path)

"""Text files: plain text, and documents and conversations as lines of JSON."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support import dense_models
from tests.support.command import error
from vllm_gac.errors import CheckpointError
from vllm_gac.texts.text_files import blocks
from vllm_gac.texts.token_text import windows

TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    dense_models.write_tokenizer(directory / "tokenizer.json", 128)
    return directory


def lines(tmp_path: Path, *values: Any) -> Path:
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path


def texts(model: Path, path: Path) -> list[tuple[str, bool]]:
    return [(block.text, block.begins) for block in blocks(model, path, None)]


def with_template(model: Path, **config: Any) -> Path:
    raw = {"chat_template": TEMPLATE, "bos_token": {"content": "<s>"}} | config
    (model / "tokenizer_config.json").write_text(json.dumps(raw))
    return model


@pytest.mark.parametrize(
    ("line", "warned"),
    [
        ('{"text": "not a line of .jsonl"}', True),
        ('{"messages": []}', True),
        ('{"name": "something else"}', False),
        ('{"text": "no JSON}', False),
        ("[" * 9999, False),
        ("words", False),
    ],
)
def test_plain_text_is_as_it_stands_and_lines_of_json_are_told(
    line: str, warned: bool, model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "a.txt"
    path.write_text(line + "\n" + line + "\n")
    assert texts(model, path) == [(path.read_text(), True)]
    told = [f"{path}: begins with a line of JSON" in text for text in caplog.messages]
    assert told == [True] * warned


def test_each_line_is_a_document(model: Path, tmp_path: Path) -> None:
    path = lines(tmp_path, {"text": "one", "id": 1}, {"text": "two\n"})
    path.write_text(path.read_text() + "\n")
    assert texts(model, path) == [("one", True), ("two\n", True)]
    (ids,) = windows(model, [path], length=100, max_tokens=None)
    (tmp_path / "plain").write_text("onetwo\n")
    (plain,) = windows(model, [tmp_path / "plain"], length=100, max_tokens=None)
    assert ids.tolist() == plain.tolist()


@pytest.mark.parametrize("where", ["config", "named", "file"])
def test_conversations_go_through_the_models_template(
    where: str, model: Path, tmp_path: Path
) -> None:
    named = [{"name": "tool", "template": "no"}, {"name": "default", "template": TEMPLATE}]
    with_template(model, **{"chat_template": named} if where == "named" else {})
    if where == "file":
        with_template(model, chat_template="no")
        (model / "chat_template.jinja").write_text(TEMPLATE)
    path = lines(tmp_path, {"messages": CHAT}, {"text": "x"})
    assert texts(model, path) == [("<s>user: hi\nassistant: ho\n", False), ("x", True)]


@pytest.mark.parametrize("name", ["data.jsonl.gz", "c4-train.00000-of-01024.json.gz", "A.JSONL.GZ"])
def test_gzipped_lines_are_read_as_the_lines(name: str, model: Path, tmp_path: Path) -> None:
    path = tmp_path / name
    plain = lines(tmp_path, {"text": "one"}, {"text": "two"})
    path.write_bytes(gzip.compress(plain.read_bytes()))
    assert texts(model, path) == texts(model, plain) == [("one", True), ("two", True)]
    (tmp_path / "plain.json.gz").write_bytes(plain.read_bytes())
    with pytest.raises(CheckpointError, match=r"plain\.json\.gz: cannot be read \(Not a gzipped"):
        texts(model, tmp_path / "plain.json.gz")


@pytest.mark.parametrize("broken", ["cut", "changed"])
def test_a_broken_gzipped_file_is_one_sentence(broken: str, model: Path, tmp_path: Path) -> None:
    path = tmp_path / "data.json.gz"
    packed = bytearray(gzip.compress(b'{"text": "one"}\n' * 50))
    if broken == "cut":
        del packed[-9:]
    else:
        packed[len(packed) // 2] ^= 0xFF
    path.write_bytes(packed)
    with pytest.raises(CheckpointError, match=r"data\.json\.gz: cannot be read \("):
        texts(model, path)
    path.write_bytes(gzip.compress(b'[{"text": "an array"}]'))
    with pytest.raises(
        CheckpointError, match=r"data\.json\.gz:1: expected a JSON object, got list"
    ):
        texts(model, path)
    path.write_bytes(gzip.compress(b" " * (1 << 25)))
    with pytest.raises(CheckpointError, match=r"json\.gz:1: a line of more than 8388608 bytes"):
        texts(model, path)


def test_the_first_characters_are_enough(model: Path, tmp_path: Path) -> None:
    path = lines(tmp_path, *({"text": "x" * 10} for _ in range(100)))
    assert len(list(blocks(model, path, 35))) == 4


REFUSED: dict[str, tuple[Any, str]] = {
    "neither": ({"content": "x"}, "data.jsonl:2: neither a 'text' nor 'messages'; one JSON object"),
    "a number": ({"text": 3}, "data.jsonl:2: neither a 'text' nor 'messages'"),
    "a list": (["x"], "data.jsonl:2: expected a JSON object, got list"),
    "half a character": ({"text": "x\ud83d"}, r"data.jsonl:2: '\ud83d' is half of a character"),
    "messages that are none": ({"messages": "x"}, "data.jsonl:2: 'messages' is not a list of obj"),
    "messages the template refuses": (
        {"messages": [{"role": "bad"}]},
        "data.jsonl:2: the model's chat template does not take these messages (no such role)",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_line_that_is_no_text_is_named(case: str, model: Path, tmp_path: Path) -> None:
    value, message = REFUSED[case]
    with_template(model, chat_template="{{ raise_exception('no such role') }}")
    with pytest.raises(CheckpointError) as refused:
        texts(model, lines(tmp_path, {"text": "x"}, value))
    assert message in str(refused.value)


def test_messages_need_a_template(model: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no chat template to make text of them"):
        texts(model, lines(tmp_path, {"messages": CHAT}))


@pytest.mark.parametrize("name", ["data.json", "text.txt.gz"])
def test_files_that_are_no_text_are_named(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dense = dense_models.write(tmp_path / "dense", dense_models.config())
    (tmp_path / name).write_text("x" * 9999)
    for args in (
        ("evaluate", dense, "--text", tmp_path / name),
        ("calibrate", dense, "--text", tmp_path / name, "--out", tmp_path / "stats"),
    ):
        said = error(capsys, *args)
        assert f"{Path(name).suffix} files are not read; give UTF-8 text, or one JSON" in said


def test_a_template_that_is_too_large_is_refused_rather_than_cut(
    model: Path, tmp_path: Path
) -> None:
    (model / "chat_template.jinja").write_text(TEMPLATE + "{# " + "x" * (1 << 20) + " #}")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja: larger than 1048576 bytes"):
        texts(model, lines(tmp_path, {"messages": CHAT}))

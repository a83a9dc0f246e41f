"""What a text costs is bounded by its words, however it is written, and by the tokens wanted."""

import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support import dense_models
from tests.support.command import command
from vllm_gac.errors import CheckpointError
from vllm_gac.steps.calibration_text import sha256_of
from vllm_gac.texts import chat_template, text_records, text_share, token_text
from vllm_gac.texts.chat_template import ChatTemplate
from vllm_gac.texts.text_files import blocks
from vllm_gac.texts.token_text import calibration_sequences, windows


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of a few kilobytes reach the bounds."""
    monkeypatch.setattr(text_share, "_FREE", 1 << 18)
    monkeypatch.setattr(text_records, "MAX_RECORD", 1 << 18)
    monkeypatch.setattr(text_records, "_MEMORY", 1 << 26)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    dense_models.write_tokenizer(directory / "tokenizer.json", 128)
    return directory


def hollow(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


def parquet(texts: list[Any], **options: Any) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        pq.write_table(pa.table({"text": pa.array(texts)}), path, **options)

    return write


def written(raw: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(raw)


BLANK = b"\n" * 1100
BOMBS: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "blank lines": ("a.jsonl", written(BLANK), "a.jsonl: hardly any text: 0 characters"),
    "a hundred bytes of blank lines": (
        *("a.jsonl.gz", written(gzip.compress(BLANK)), "a.jsonl.gz: hardly any text"),
    ),
    "empty texts": ("a.jsonl", written(b'{"text":""}\n' * 1100), "a.jsonl: hardly any text"),
    "a word in much else": (
        "a.jsonl",
        written((json.dumps({"text": "word", "x": "x" * 24_000}) + "\n").encode() * 17),
        "a.jsonl: hardly any text: 40 characters in the first 11 records",
    ),
    "rows without text": ("a.parquet", parquet([""] * 1100), "a.parquet: hardly any text"),
    "rows of nothing": ("a.parquet", parquet([None] * 1100), "a.parquet: "),
    "a hole": ("a.txt", hollow, "a.txt: 1099511627776 bytes long, of which 0 are stored"),
    "a hole of lines": ("a.jsonl", hollow, "a.jsonl: 1099511627776 bytes long, of which 0"),
    "brackets": (
        "a.jsonl",
        written(b'{"text": "a", "x": [' + b"[]," * 40_000 + b"[]]}"),
        "a.jsonl:1: more than 65536 values",
    ),
    "brackets in brackets": (
        "a.jsonl",
        written(b'{"text": "a", "x": ' + b"[" * 100 + b"]" * 100 + b"}"),
        "a.jsonl:1: JSON is nested too deeply",
    ),
    "a long line": (
        *("a.jsonl", written(b'{"text": "' + b"a" * (1 << 18)), "a.jsonl:1: a line of more than"),
    ),
    "a long row": (
        *("a.parquet", parquet(["a" * 270_000]), "a.parquet: row 1: more than 262144 bytes"),
    ),
}
UNPACKED: dict[str, list[Any]] = {
    "a row that repeats a long text": [["a" * 100_000] * 800],
    "a page of much": ["a" * (1 << 26)],
}
READ = """
import sys
from pathlib import Path
from vllm_gac.errors import CheckpointError
from vllm_gac.texts import text_records
from vllm_gac.texts.token_text import calibration_sequences, windows

text_records.MAX_RECORD, text_records._MEMORY = 1 << 18, 1 << 26
model, text = map(Path, sys.argv[1:])
for read in (windows, calibration_sequences):
    try:
        read(model, [text], length=8, max_tokens=64)
    except CheckpointError as error:
        print(error)
"""


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_file_that_costs_more_than_its_words_is_refused(
    bomb: str, model: Path, tmp_path: Path
) -> None:
    name, write, message = BOMBS[bomb]
    write(tmp_path / name)
    for read in (windows, calibration_sequences):
        with pytest.raises(CheckpointError) as refused:
            read(model, [tmp_path / name], length=8, max_tokens=64)
        assert message in str(refused.value)


@pytest.mark.parametrize("texts", UNPACKED.values(), ids=UNPACKED)
def test_a_file_that_unpacks_to_much_is_refused(
    texts: list[Any], model: Path, tmp_path: Path
) -> None:
    """It is read by a process that has no memory to spare: this one may have, from other tests."""
    path = tmp_path / "a.parquet"
    parquet(texts, compression="zstd")(path)
    said = command(model, path, code=READ)
    message = "a.parquet: takes more than 67108864 bytes of memory to unpack"
    assert [message in line for line in said.stdout.splitlines()] == [True] * 2, said.stderr


def test_commas_and_brackets_of_the_words_are_no_values(model: Path, tmp_path: Path) -> None:
    words = r"[,{\"" * 30_000 + "\\"
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": words}))
    assert "".join(block.text for block in blocks(model, path, None)) == words


def test_text_pays_for_blank_lines_and_other_values(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes((json.dumps({"text": "word " * 10}).encode() + b"\n\n\n\n") * 900)
    assert sum(len(block.text) for block in blocks(model, path, None)) == 900 * 50


def test_a_file_is_read_no_further_than_its_tokens_are_wanted(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "words that are enough"}\n' * 4 + b"no line of JSON")
    with pytest.raises(CheckpointError, match=r"a\.jsonl:5: not valid JSON"):
        windows(model, [path], length=4, max_tokens=None)
    (ids,) = windows(model, [path, tmp_path / "none"], length=4, max_tokens=8)
    assert ids.shape == (2, 4)


def test_few_calibration_tokens_are_taken_from_a_smaller_part(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.txt"
    path.write_text("a" * 4000 + "b" * 4000)
    monkeypatch.setattr(token_text, "_MIN_CHARACTERS", 4000 - 256 * 8)
    first = calibration_sequences(model, [path], length=2, max_tokens=8)
    assert len(first.unique()) == 1
    whole = calibration_sequences(model, [path], length=2, max_tokens=8, characters=1 << 20)
    assert len(whole.unique()) > 1


def test_words_that_make_no_tokens_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense_models.write_tokenizer(tmp_path / "tokenizer.json", 128)
    raw = json.loads((tmp_path / "tokenizer.json").read_text())
    raw["normalizer"] = {"type": "Replace", "pattern": {"String": "a"}, "content": ""}
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    (tmp_path / "a.txt").write_text("a" * 300_000)
    monkeypatch.setattr(token_text, "_MIN_CHARACTERS", 100_000)
    with pytest.raises(CheckpointError, match=r"characters have only 0 tokens, 64 are wanted"):
        windows(tmp_path, [tmp_path / "a.txt"], length=8, max_tokens=64)


def test_a_hole_has_no_digest(tmp_path: Path) -> None:
    hollow(tmp_path / "a.txt")
    with pytest.raises(CheckpointError, match="the rest is a hole"):
        sha256_of(tmp_path / "a.txt")


TEMPLATES = {
    "memory": ("{{ 'x' * 10**9 }}", "out of memory"),
    "doubled text": (
        "{% set n = namespace(x='abcdefgh') %}"
        "{% for i in range(26) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
        "out of memory",
    ),
    "a long text": ("{{ 'x' * 5000000 }}", "it makes 5000000 characters of them, at most 4194304"),
    "a loop": (
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}x",
        "was ended: it takes more time or memory than a template needs",
    ),
}


@pytest.mark.parametrize("bomb", TEMPLATES)
def test_a_template_is_ended_at_its_limits(
    bomb: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, message = TEMPLATES[bomb]
    monkeypatch.setattr(chat_template, "_SECONDS", 0.2 if bomb == "a loop" else 60)
    (tmp_path / "chat_template.jinja").write_text(source)
    with (
        ChatTemplate(tmp_path, tmp_path / "a.jsonl") as template,
        pytest.raises(CheckpointError, match=message),
    ):
        template.render([{"role": "user", "content": "hi"}], "a.jsonl:1")


def test_the_process_of_a_template_ends_with_it_and_with_who_started_it(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    with ChatTemplate(tmp_path, tmp_path / "a.jsonl") as template:
        assert template.render([{"role": "user", "content": "hi"}], "a.jsonl:1") == "hi"
    assert not template._renderer.process.is_alive()
    alone = ChatTemplate(tmp_path, tmp_path / "a.jsonl")._renderer
    alone.connection.close()  # as when this process is killed
    alone.process.join()
    assert alone.process.exitcode == 0


@pytest.mark.parametrize("named", [[{"name": [], "template": "x"}], [3], [{"name": "default"}], {}])
def test_templates_of_no_use_are_none(named: Any, tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    with pytest.raises(CheckpointError, match="has no chat template"):
        ChatTemplate(tmp_path, tmp_path / "a.jsonl")


def test_a_small_file_is_not_much_text(model: Path, tmp_path: Path) -> None:
    parquet(["a" * 200_000] * 99, compression="zstd")(tmp_path / "a.parquet")
    with pytest.raises(CheckpointError, match=r"a\.parquet: unpacks to more than \d+ bytes, 256"):
        list(blocks(model, tmp_path / "a.parquet", None))


@pytest.mark.parametrize(
    "options",
    [{}, {"use_dictionary": False}, {"data_page_version": "2.0", "compression": "zstd"}],
)
def test_all_rows_of_a_parquet_file_are_read(
    options: dict[str, Any], model: Path, tmp_path: Path
) -> None:
    texts = [f"{number} {'x' * 500}" for number in range(200)]
    parquet(texts, row_group_size=70, **options)(tmp_path / "a.parquet")
    assert [block.text for block in blocks(model, tmp_path / "a.parquet", None)] == texts


def test_a_parquet_file_with_broken_pages_is_one_sentence(model: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    parquet(["word"] * 100)(path)
    sound = path.read_bytes()
    for at in range(4, 60, 4):
        path.write_bytes(sound[:at] + bytes([sound[at] ^ 0x5A]) + sound[at + 1 :])
        try:
            list(blocks(model, path, None))
        except CheckpointError as e:
            assert str(e).startswith(str(path))  # noqa: PT017

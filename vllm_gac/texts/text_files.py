"""Reading texts: plain text, or rows that have a text or a conversation.

Lines of JSON, .parquet files and data sets on the Hub have rows; the package `datasets` reads the
last two, and no code of a data set runs. The text of a row is under "text"; or under "messages" is
a conversation, which the model's chat template turns into text. Every other file is UTF-8 text.
"""

import gzip
import io
import json
import logging
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO, cast

from vllm_gac.checkpoint.hub import hub_faults
from vllm_gac.checkpoint.untrusted_files import open_untrusted
from vllm_gac.errors import CheckpointError, GacError
from vllm_gac.texts.hub_texts import as_given, data_set, is_data_set
from vllm_gac.texts.tokenizer import ModelTokenizer

logger = logging.getLogger(__name__)

# Characters of one block. Some tokenizers take quadratic time on one long string.
_BLOCK = 1 << 16
# Characters of a piece of a .txt file: it ends at the first blank line after so many, or at the
# first line after so many more.
_PIECE, _MAX_PIECE = 2000, 8000
# Suffixes of data set files that are not plain text.
_NOT_TEXT = (".json", ".arrow", ".gz", ".zst", ".zip", ".bz2", ".xz", ".pdf", ".docx")
_JSON_LINES = (".jsonl", ".jsonl.gz", ".json.gz")
_TABLES = (".parquet",)
# The columns that are read.
_COLUMNS = ("text", "messages", "tools")


@dataclass(frozen=True, slots=True)
class Block:
    """Text to tokenize; `begins` says whether the tokenizer's leading tokens precede it."""

    text: str
    begins: bool


@dataclass(frozen=True, slots=True)
class Document:
    """A document.

    Attributes:
        name: Its file, and the line or row.
        text: Its text.
        begins: Whether the tokenizer's leading tokens precede it.
    """

    name: str
    text: str
    begins: bool

    def blocks(self) -> Iterator[Block]:
        """Its text in parts that are tokenized one by one."""
        for start in range(0, len(self.text), _BLOCK):
            yield Block(self.text[start : start + _BLOCK], self.begins and start == 0)


def blocks(tokenizer: ModelTokenizer, path: Path) -> Iterator[Block]:
    """The text in `path`.

    Raises CheckpointError naming the file that cannot be read as text, and its line or row.
    """
    if not has_rows(path):
        yield from _plain(path)
        return
    for document in _row_documents(tokenizer, path):
        yield from document.blocks()


def documents_of(tokenizer: ModelTokenizer, path: Path) -> Iterator[Document]:
    """The documents of a text: its rows, or pieces of plain text.

    Plain text is split at form feeds, and at blank lines into pieces of 2,000 characters or more.
    Raises CheckpointError naming the file that cannot be read as text, and its line or row.
    """
    return _row_documents(tokenizer, path) if has_rows(path) else _pieces(path)


def has_rows(text: Path) -> bool:
    """Whether a text has rows, by its name."""
    return is_data_set(text) or text.name.lower().endswith((*_JSON_LINES, *_TABLES))


def rows(text: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Where each row of a text is, and the row.

    Raises:
        CheckpointError: The file, or a line of it, cannot be read, or `datasets` is not installed.
        HubError: The data set cannot be had.
    """
    if is_data_set(text):
        yield from _data_set_rows(text)
        return
    with open_untrusted(text) as file:
        is_table = text.name.lower().endswith(_TABLES)
        yield from _table_rows(text) if is_table else _json_lines(text, file)


def has_messages(text: Path) -> bool:
    """Whether the first row of a text is a conversation. Raises as `rows` does."""
    _, row = next(iter(rows(text)), ("", {})) if has_rows(text) else ("", {})
    return row.get("messages") is not None


def _json_lines(path: Path, file: io.BufferedReader) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if path.suffix.lower() == ".gz":  # GzipFile's own lines are slow
        file = io.BufferedReader(cast(Any, gzip.GzipFile(fileobj=file)))
    try:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield f"{path}:{number}", _parsed(line, f"{path}:{number}")
    except (EOFError, zlib.error) as e:  # of a broken .gz file
        raise CheckpointError(f"{path}: cannot be read ({e})") from e


def _parsed(line: bytes, where: str) -> Mapping[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as e:
        raise CheckpointError(f"{where}: not valid JSON ({e})") from e
    if not isinstance(row, dict):
        raise CheckpointError(f"{where}: expected a JSON object, got {type(row).__name__}")
    return row


def _table_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    load_dataset = _load_dataset(str(path))
    try:
        yield from _read(str(path), load_dataset("parquet", data_files=str(path), streaming=True))
    except GacError:
        raise
    except Exception as e:  # what datasets and pyarrow raise has no common base
        raise CheckpointError(f"{path}: cannot be read ({type(e).__name__}: {e})") from e


def _data_set_rows(text: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    name, of = as_given(text), data_set(text)
    load_dataset = _load_dataset(name)
    inside = {"data_files" if Path(of.path).suffix else "data_dir": of.path} if of.path else {}
    with hub_faults(of.name, "data set", of.revision, f"{name}:"):
        splits = load_dataset(of.name, revision=of.revision, streaming=True, **inside)
        yield from _read(name, splits)


def _load_dataset(name: str) -> Callable[..., Any]:
    try:
        import datasets
    except ModuleNotFoundError as e:
        raise CheckpointError(
            f"{name}: is read by the package datasets, which is not installed: "
            "pip install 'vllm-gac[datasets]', or give text or .jsonl"
        ) from e
    return cast(Callable[..., Any], datasets.load_dataset)


def _read(name: str, splits: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The rows of the split to train on."""
    split = next((split for split in splits if "train" in split), next(iter(splits)))
    table = splits[split]
    if columns := table.column_names:
        if not {"text", "messages"} & set(columns):
            raise CheckpointError(
                f"{name}: neither a column 'text' nor 'messages'; it has {', '.join(columns)}"
            )
        table = table.select_columns([column for column in _COLUMNS if column in columns])
    for number, row in enumerate(table, 1):
        yield f"{name}: row {number}", row


def _row_documents(tokenizer: ModelTokenizer, path: Path) -> Iterator[Document]:
    """The rows of `path` that have text. Raises CheckpointError naming the line or row."""
    for where, row in rows(path):
        if isinstance(row.get("text"), str):
            text, begins = row["text"], True
        elif row.get("messages") is not None:
            # The template writes the leading tokens itself.
            text, begins = tokenizer.render(row["messages"], row.get("tools"), where), False
        elif "text" in row and row["text"] is None:
            continue
        else:
            raise CheckpointError(
                f"{where}: neither a 'text' nor 'messages'; each row has its words under 'text' or "
                "a conversation under 'messages'"
            )
        try:
            text.encode()
        except UnicodeEncodeError as e:
            raise CheckpointError(f"{where}: has half of a character, {text[e.start]!a}") from e
        if text:
            yield Document(where, text, begins)


def _pieces(path: Path) -> Iterator[Document]:
    with plain_text(path) as file:
        number, piece, begin, begins = 1, "", 1, True
        while line := file.readline(_MAX_PIECE):
            if piece and line.startswith("\f"):
                yield Document(f"{path}:{begin}", piece, begins)
                piece, begin, begins = "", number, False
            piece += line
            number += line.endswith("\n")
            if len(piece) >= (_PIECE if line.isspace() else _MAX_PIECE):
                yield Document(f"{path}:{begin}", piece, begins)
                piece, begin, begins = "", number, False
        if piece:
            yield Document(f"{path}:{begin}", piece, begins)


@contextmanager
def plain_text(path: Path) -> Iterator[TextIO]:
    """Open a file of plain text. Raises CheckpointError if it cannot be read as UTF-8."""
    if (kind := path.suffix.lower()) in _NOT_TEXT:
        raise CheckpointError(
            f"{path}: {kind} files are not read; give UTF-8 text, .jsonl or .parquet"
        )
    with (
        open_untrusted(path) as raw,
        io.TextIOWrapper(raw, encoding="utf-8-sig", newline="") as file,
    ):
        if raw.peek().startswith((b'{"text":', b'{"messages":')):
            logger.warning(
                "%s: begins with a line of JSON and is read as it stands, braces and names too; "
                "name it .jsonl for the words under 'text' or 'messages' alone",
                path,
            )
        try:
            yield file
        except UnicodeDecodeError as e:
            raise CheckpointError(f"{path}: not UTF-8 text ({e}); save it as UTF-8") from e


def _plain(path: Path) -> Iterator[Block]:
    with plain_text(path) as file:
        begins = True
        while text := file.read(_BLOCK):
            yield Block(text + file.readline(_BLOCK), begins)
            begins = False

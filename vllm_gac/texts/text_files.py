"""Reading text files: plain text, or documents and conversations as lines of JSON or in Parquet.

A .jsonl file has one object in each line, and a .parquet file one in each row. Its text is under
"text"; or under "messages" is a conversation, which the model's chat template turns into text.
Lines of JSON may be gzipped: in a .jsonl.gz file, or in a .json.gz file, as data sets on the Hub
call it. Every other file is plain UTF-8 text.
"""

import io
import json
import logging
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from vllm_gac.checkpoint.regular_files import opened
from vllm_gac.errors import CheckpointError
from vllm_gac.texts.chat_template import ChatTemplate
from vllm_gac.texts.text_records import json_lines, parquet_rows
from vllm_gac.texts.text_share import TextShare

logger = logging.getLogger(__name__)

# Characters of one block. Some tokenizers take quadratic time on one long string.
_BLOCK = 1 << 16
_LINES = "one JSON object a line, with its words under 'text' or its 'messages', in a .jsonl file"
# How the names of files with records end, and what reads them.
_RECORDS = {
    ".jsonl": json_lines,
    ".jsonl.gz": json_lines,
    ".json.gz": json_lines,
    ".parquet": parquet_rows,
}
# Suffixes of data set files that are not plain text.
_NOT_TEXT = (".json", ".arrow", ".gz", ".zst", ".zip", ".bz2", ".xz", ".pdf", ".docx")


@dataclass(frozen=True, slots=True)
class Block:
    """Text to tokenize; `begins` says whether the tokenizer's leading tokens precede it."""

    text: str
    begins: bool


def blocks(model: Path, path: Path, characters: int | None) -> Iterator[Block]:
    """The first `characters` of the text in `path` (None: all), for the model in `model`.

    Raises CheckpointError naming the file that cannot be read as text, and the line of a .jsonl.
    """
    left = characters
    found = _documents(model, path) if is_records(path) else _plain(path, characters)
    for block in found:
        if left is not None and left <= 0:
            return
        yield block
        left = None if left is None else left - len(block.text)


def is_records(path: Path) -> bool:
    """Whether the file has records. Raises CheckpointError if it has neither these nor text."""
    if any(path.name.lower().endswith(end) for end in _RECORDS):
        return True
    if (kind := path.suffix.lower()) in _NOT_TEXT:
        raise CheckpointError(f"{path}: {kind} files are not read; give UTF-8 text, or {_LINES}")
    return False


def _plain(path: Path, characters: int | None) -> Iterator[Block]:
    with opened(path) as raw, io.TextIOWrapper(raw, encoding="utf-8", newline="") as file:
        left, first = characters if characters is not None else -1, True
        try:
            while left and (text := file.read(_BLOCK if left < 0 else min(_BLOCK, left))):
                left -= len(text) if left > 0 else 0
                if first and _is_document(text.partition("\n")[0]):
                    logger.warning(
                        "%s: begins with a line of JSON and is read as it stands, braces and names "
                        "too; name it .jsonl for the words under 'text' or 'messages' alone",
                        path,
                    )
                yield Block(text + (file.readline(_BLOCK) if left else ""), first)
                first = False
        except UnicodeDecodeError as e:
            raise CheckpointError(f"{path}: cannot be read as UTF-8 text ({e})") from e


def _is_document(line: str) -> bool:
    """Whether a line could be a line of a .jsonl file."""
    if not line.startswith("{"):
        return False
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) and not value.keys().isdisjoint(("text", "messages"))


def _documents(model: Path, path: Path) -> Iterator[Block]:
    for _, text, begins in records(model, path):
        for number, part in enumerate(cut(text)):
            yield Block(part, begins and not number)


def records(model: Path, path: Path) -> Iterator[tuple[str, str, bool]]:
    """Of each record in `path`: where it is, its text, and whether leading tokens precede it."""
    share, template = TextShare(path), None
    read = next(read for end, read in _RECORDS.items() if path.name.lower().endswith(end))
    with ExitStack() as stack:
        for where, value in read(path, share):
            if isinstance(text := value.get("text"), str):
                begins = True
            elif "messages" in value:
                template = template or stack.enter_context(ChatTemplate(model, path))
                # The template writes the leading tokens itself.
                text, begins = template.render(value["messages"], where), False
            else:
                raise CheckpointError(f"{where}: neither a 'text' nor 'messages'; {_LINES}")
            share.found(len(text))
            try:
                text.encode()
            except UnicodeEncodeError as e:
                raise CheckpointError(
                    f"{where}: {text[e.start]!a} is half of a character, which no UTF-8 text can "
                    "hold; drop it"
                ) from e
            yield where, text, begins


def cut(text: str) -> list[str]:
    """Parts of `text` that are tokenized one by one."""
    return [text[start : start + _BLOCK] for start in range(0, len(text), _BLOCK)]

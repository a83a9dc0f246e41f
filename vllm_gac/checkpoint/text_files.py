"""Reading text files: plain text, or documents and conversations as lines of JSON or in Parquet.

A .jsonl file has one object in each line, and a .parquet file one in each row. Its text is under
"text"; or under "messages" is a conversation, which the model's chat template turns into text.
Lines of JSON may be gzipped: in a .jsonl.gz file, or in a .json.gz file, as data sets on the Hub
call it. Every other file is plain UTF-8 text.
"""

import json
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_gac.checkpoint.headers import refuse_escape
from vllm_gac.checkpoint.regular_files import open_regular
from vllm_gac.checkpoint.strict_json import read_bounded, read_json
from vllm_gac.checkpoint.text_records import json_lines, parquet_rows
from vllm_gac.errors import CheckpointError

logger = logging.getLogger(__name__)

# Characters of one block. Some tokenizers take quadratic time on one long string.
_BLOCK = 1 << 16
_LARGEST_TEMPLATE = 1 << 20  # bytes
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
    name, kind = path.name.lower(), path.suffix.lower()
    records = next((read for end, read in _RECORDS.items() if name.endswith(end)), None)
    if records is None and kind in _NOT_TEXT:
        raise CheckpointError(f"{path}: {kind} files are not read; give UTF-8 text, or {_LINES}")
    left = characters
    found = _documents(model, path, records(path)) if records else _plain(path, characters)
    for block in found:
        if left is not None and left <= 0:
            return
        yield block
        left = None if left is None else left - len(block.text)


def _plain(path: Path, characters: int | None) -> Iterator[Block]:
    try:
        with os.fdopen(open_regular(path), encoding="utf-8", newline="") as file:
            left, first = characters if characters is not None else -1, True
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
    except OSError as e:
        raise CheckpointError(f"{path}: cannot be read ({e.strerror or e})") from e
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


def _documents(
    model: Path, path: Path, records: Iterator[tuple[str, Mapping[str, Any]]]
) -> Iterator[Block]:
    """The texts of `records`: where each is, and its values."""
    template: _Template | None = None
    for where, value in records:
        if isinstance(text := value.get("text"), str):
            yield from _pieces(text, where, begins=True)
        elif "messages" in value:
            template = template or _chat_template(model, path)
            # The template writes the leading tokens itself.
            text = template.render(value["messages"], where)
            yield from _pieces(text, where, begins=False)
        else:
            raise CheckpointError(f"{where}: neither a 'text' nor 'messages'; {_LINES}")


def _pieces(text: str, where: str, *, begins: bool) -> Iterator[Block]:
    try:
        text.encode()
    except UnicodeEncodeError as e:
        raise CheckpointError(
            f"{where}: {text[e.start]!a} is half of a character, which no UTF-8 text can hold; "
            "drop it"
        ) from e
    for start in range(0, len(text), _BLOCK):
        yield Block(text[start : start + _BLOCK], begins and start == 0)


@dataclass(frozen=True, slots=True)
class _Template:
    """A model's chat template, and the special tokens that it may refer to."""

    source: str
    tokens: dict[str, Any]

    def render(self, messages: Any, where: str) -> str:
        """The text of a conversation. Raises CheckpointError if the template refuses it."""
        from transformers.utils.chat_template_utils import render_jinja_template

        if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
            raise CheckpointError(f"{where}: 'messages' is not a list of objects")
        try:
            (text,), _ = render_jinja_template([messages], chat_template=self.source, **self.tokens)
        except MemoryError:
            raise
        except Exception as e:  # a template may raise anything
            raise CheckpointError(
                f"{where}: the model's chat template does not take these messages ({str(e)[:200]})"
            ) from e
        return str(text)


def _chat_template(model: Path, path: Path) -> _Template:
    """The chat template in the model directory, for the messages in `path`."""
    config_path = model / "tokenizer_config.json"
    config = {}
    if config_path.exists():
        refuse_escape(model, config_path)
        config = read_json(config_path)
    source = config.get("chat_template")
    if isinstance(source, list):  # several named templates
        named = {t.get("name"): t.get("template") for t in source if isinstance(t, dict)}
        source = named.get("default")
    file = model / "chat_template.jinja"
    if file.exists():
        refuse_escape(model, file)
        raw = read_bounded(file, CheckpointError, _LARGEST_TEMPLATE + 1)
        if len(raw) > _LARGEST_TEMPLATE:
            raise CheckpointError(
                f"{file}: larger than {_LARGEST_TEMPLATE} bytes, the largest chat template that "
                "is read"
            )
        source = raw.decode("utf-8", "replace")
    if not isinstance(source, str):
        raise CheckpointError(
            f"{path}: has 'messages', and {model} has no chat template to make text of them; "
            "give lines with a 'text'"
        )
    tokens = {key: value for key, value in config.items() if key.endswith("_token")}
    contents = {
        key: value.get("content") if isinstance(value, dict) else value
        for key, value in tokens.items()
    }
    return _Template(source, {k: v for k, v in contents.items() if isinstance(v, str)})

"""Texts that have rows: lines of JSON, .parquet files, and data sets on the Hub.

The package `datasets` reads the last two. No code of a data set runs.
"""

import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from vllm_gac.checkpoint.hub import hub_faults
from vllm_gac.checkpoint.untrusted_files import open_untrusted
from vllm_gac.errors import CheckpointError, GacError
from vllm_gac.texts.hub_texts import as_given, data_set, is_data_set

_JSON_LINES = (".jsonl", ".jsonl.gz", ".json.gz")
_TABLES = (".parquet",)
# The columns that are read.
_COLUMNS = ("text", "messages", "tools")


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

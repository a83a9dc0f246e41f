"""Records with text: the lines of a .jsonl file, and the rows of a .parquet file."""

import zlib
from collections.abc import Iterator, Mapping
from gzip import GzipFile
from io import BufferedReader
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, BinaryIO, cast

from vllm_gac.checkpoint.regular_files import opened
from vllm_gac.checkpoint.strict_json import parse_json
from vllm_gac.errors import CheckpointError, GacError
from vllm_gac.texts.limited_process import LimitedProcess
from vllm_gac.texts.text_share import TextShare

# Bytes of one record. As Python's strings, they may take four times as many.
MAX_RECORD = 1 << 23
# Rows that are in memory at once, and the bytes of memory to read them with. A few kilobytes of
# a .parquet file may be a page of two gigabytes, or a row that repeats one text a million times.
_ROWS, _MEMORY = 16, 1 << 29
_BUFFER = 1 << 20
_COLUMNS = ("text", "messages")


def json_lines(path: Path, share: TextShare) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each object of a .jsonl file, gzipped or not, and where it is.

    Raises CheckpointError naming the line, or the file if `share` refuses it.
    """
    with opened(path) as file:
        try:
            number = 0
            lines = _unpacked(path, file)
            while line := lines.readline(MAX_RECORD + 1):
                number += 1
                where = f"{path}:{number}"
                if len(line) > MAX_RECORD:
                    raise CheckpointError(f"{where}: a line of more than {MAX_RECORD} bytes")
                share.read(len(line))
                if line.strip():
                    yield where, parse_json(line, where)
        except (EOFError, zlib.error) as e:  # of a broken .gz file
            raise CheckpointError(f"{path}: cannot be read ({e})") from e


def _unpacked(path: Path, file: BufferedReader) -> BufferedReader:
    if path.suffix.lower() != ".gz":
        return file
    # GzipFile's own readline is Python, and slow for short lines.
    return BufferedReader(cast(Any, GzipFile(fileobj=file)), _BUFFER)


def parquet_rows(path: Path, share: TextShare) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The column "text", or else "messages", of each row of a .parquet file, and where it is.

    Raises CheckpointError if the file cannot be read, `share` refuses it, or pyarrow is not
    installed.
    """
    try:
        import pyarrow.parquet  # noqa: F401 -- the process inherits it
    except ModuleNotFoundError as e:
        raise CheckpointError(
            f"{path}: .parquet files are read by pyarrow, which is not installed: install vllm-gac "
            "with its extra 'datasets', or give text or .jsonl"
        ) from e
    with (
        opened(path) as file,
        LimitedProcess(_MEMORY, _send_rows, path, file) as reader,
    ):
        while True:
            try:
                where, size, value = reader.connection.recv()
            except (EOFError, OSError) as e:
                raise _too_much(path) from e
            if isinstance(value, GacError):
                raise value
            if where is None:
                return
            share.read(size)
            if value is not None:
                yield where, value


def _too_much(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path}: takes more than {_MEMORY} bytes of memory to unpack; write it with smaller pages "
        "and rows, or give text or .jsonl"
    )


def _send_rows(connection: Connection, path: Path, file: BinaryIO) -> None:
    """The process: send where each row is, its bytes and its value, then an error or None."""
    try:
        for row in _rows(path, file):
            connection.send(row)
    except GacError as error:
        connection.send((None, 0, error))
    except MemoryError:
        connection.send((None, 0, _too_much(path)))
    except (OSError, ValueError, NotImplementedError) as e:  # pyarrow's errors
        connection.send((None, 0, CheckpointError(f"{path}: not a readable .parquet file ({e})")))
    else:
        connection.send((None, 0, None))


def _rows(path: Path, file: BinaryIO) -> Iterator[tuple[str, int, Mapping[str, Any] | None]]:
    import pyarrow
    from pyarrow import parquet, types

    # The others reserve gigabytes that they do not use, and a limit counts them.
    pyarrow.set_memory_pool(pyarrow.system_memory_pool())
    pages = parquet.ParquetFile(file, buffer_size=_BUFFER)
    columns = [name for name in _COLUMNS if name in pages.schema_arrow.names][:1]
    if not columns:
        raise CheckpointError(
            f"{path}: neither a column 'text' nor 'messages'; it has "
            f"{', '.join(map(str, pages.schema_arrow.names[:8]))}"
        )
    number = 0
    for batch in pages.iter_batches(_ROWS, columns=columns, use_threads=False):
        column = batch.column(0)
        if types.is_dictionary(column.type):
            column = column.dictionary_decode()
        for index in range(len(column)):
            number += 1
            where = f"{path}: row {number}"
            if (size := column.slice(index, 1).nbytes) > MAX_RECORD:
                raise CheckpointError(f"{where}: more than {MAX_RECORD} bytes")
            value = column[index].as_py()
            yield where, size, None if value is None else {columns[0]: value}

"""Records with text: the lines of a .jsonl file, and the rows of a .parquet file."""

import zlib
from collections.abc import Iterator, Mapping
from gzip import GzipFile
from io import BufferedReader
from pathlib import Path
from typing import Any, cast

from vllm_gac.checkpoint.parquet_pages import check_pages
from vllm_gac.checkpoint.regular_files import opened
from vllm_gac.checkpoint.strict_json import parse_json
from vllm_gac.checkpoint.text_share import TextShare
from vllm_gac.errors import CheckpointError, GacError

# Bytes of one record. As Python's strings, they may take four times as many.
LONGEST = 1 << 23
# Rows that are in memory at once, and the bytes that they may take.
_ROWS, _ROW_BYTES = 256, 1 << 26
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
            while line := lines.readline(LONGEST + 1):
                number += 1
                where = f"{path}:{number}"
                if len(line) > LONGEST:
                    raise CheckpointError(f"{where}: a line of more than {LONGEST} bytes")
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
        from pyarrow import parquet
    except ModuleNotFoundError as e:
        raise CheckpointError(
            f"{path}: .parquet files are read by pyarrow, which is not installed: install vllm-gac "
            "with its extra 'datasets', or give text or .jsonl"
        ) from e
    with opened(path) as file:
        try:
            rows = parquet.ParquetFile(file, buffer_size=_BUFFER)
            columns = [name for name in _COLUMNS if name in rows.schema_arrow.names][:1]
            if not columns:
                raise CheckpointError(
                    f"{path}: neither a column 'text' nor 'messages'; it has "
                    f"{', '.join(map(str, rows.schema_arrow.names[:8]))}"
                )
            number = 0
            for group in range(rows.num_row_groups):
                largest = check_pages(path, rows.metadata.row_group(group), columns[0])
                # A row may take as many bytes as a page: many may refer to one text.
                at_once = max(1, min(_ROWS, _ROW_BYTES // largest))
                for batch in rows.iter_batches(at_once, row_groups=[group], columns=columns):
                    column = batch.column(0)
                    for index in range(len(column)):
                        number += 1
                        where = f"{path}: row {number}"
                        if (size := column.slice(index, 1).nbytes) > LONGEST:
                            raise CheckpointError(f"{where}: more than {LONGEST} bytes")
                        share.read(size)
                        if (value := column[index].as_py()) is not None:
                            yield where, {columns[0]: value}
        except GacError:
            raise
        except (OSError, ValueError, MemoryError, NotImplementedError) as e:  # pyarrow's errors
            raise CheckpointError(f"{path}: not a readable .parquet file ({e})") from e

"""Records with text: the lines of a .jsonl file, and the rows of a .parquet file."""

import zlib
from collections.abc import Iterator, Mapping
from gzip import GzipFile
from pathlib import Path
from typing import Any, BinaryIO

from vllm_gac.checkpoint.regular_files import opened
from vllm_gac.checkpoint.strict_json import parse_json
from vllm_gac.errors import CheckpointError, GacError

_LONGEST_LINE = 1 << 24
_ROWS = 256  # that are in memory at once
_COLUMNS = ("text", "messages")


def json_lines(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Each object of a .jsonl file, gzipped or not, and where it is.

    Raises CheckpointError naming the line.
    """
    try:
        with opened(path) as stored, _unpacked(path, stored) as file:
            number = 0
            while line := file.readline(_LONGEST_LINE + 1):
                number += 1
                where = f"{path}:{number}"
                if len(line) > _LONGEST_LINE:
                    raise CheckpointError(f"{where}: a line of more than {_LONGEST_LINE} bytes")
                if line.strip():
                    # Commas within texts count as parts, too.
                    yield where, parse_json(line, where, max_parts=_LONGEST_LINE)
    except (OSError, EOFError, zlib.error) as e:  # the last two: of a broken .gz file
        raise CheckpointError(
            f"{path}: cannot be read ({getattr(e, 'strerror', None) or e})"
        ) from e


def _unpacked(path: Path, stored: BinaryIO) -> GzipFile | BinaryIO:
    return GzipFile(fileobj=stored) if path.suffix.lower() == ".gz" else stored


def parquet_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The column "text", or else "messages", of each row of a .parquet file, and where it is.

    Raises CheckpointError if the file cannot be read, or pyarrow is not installed.
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
            rows = parquet.ParquetFile(file)
            columns = [name for name in _COLUMNS if name in rows.schema_arrow.names][:1]
            if not columns:
                raise CheckpointError(
                    f"{path}: neither a column 'text' nor 'messages'; it has "
                    f"{', '.join(map(str, rows.schema_arrow.names[:8]))}"
                )
            number = 0
            for batch in rows.iter_batches(_ROWS, columns=columns):
                for value in batch.column(0).to_pylist():
                    number += 1
                    if value is not None:
                        yield f"{path}: row {number}", {columns[0]: value}
        except GacError:
            raise
        except (OSError, ValueError, MemoryError, NotImplementedError) as e:  # pyarrow's errors
            raise CheckpointError(f"{path}: not a readable .parquet file ({e})") from e

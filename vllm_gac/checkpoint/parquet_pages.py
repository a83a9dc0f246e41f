"""The sizes of the pages of a .parquet file, which are read whole, before one of them is unpacked.

A page of two gigabytes may be a few kilobytes of the file, and pyarrow has no limit. The header of
a page is a struct in Thrift's compact protocol, whose first fields say its kind and its sizes.
"""

from pathlib import Path
from typing import Any, BinaryIO

from vllm_gac.checkpoint.regular_files import opened
from vllm_gac.errors import CheckpointError

# Bytes of an unpacked page. Most writers make pages of 1 MB, some of 100 MB.
_LARGEST = 1 << 27
_HEADER, _LONGEST_HEADER = 1 << 12, 1 << 20
_MOST_PAGES = 1 << 16
_DEEPEST = 8
_UNPACKED, _PACKED = 2, 3  # fields of the header


def check_pages(path: Path, row_group: Any, column: str) -> int:
    """The bytes of the largest unpacked page of `column` in a row group, at least 1.

    Args:
        path: The file.
        row_group: Its metadata, by pyarrow.
        column: The name of a column, which may have columns within.

    Raises:
        CheckpointError: A page is too large, or its header is none.
    """
    largest = 1
    with opened(path) as file:
        for number in range(row_group.num_columns):
            chunk = row_group.column(number)
            if chunk.path_in_schema.partition(".")[0] == column:
                largest = max(largest, _largest_page(path, file, chunk))
    return largest


def _largest_page(path: Path, file: BinaryIO, chunk: Any) -> int:
    starts = (chunk.data_page_offset, chunk.dictionary_page_offset)
    at = min(start for start in starts if start)  # some writers say 0 for no dictionary
    end, largest = at + chunk.total_compressed_size, 0
    for _ in range(_MOST_PAGES):
        if at >= end:
            return largest
        header, sizes = _header(path, file, at)
        packed, unpacked = sizes.get(_PACKED, -1), sizes.get(_UNPACKED, -1)
        if min(packed, unpacked) < 0:
            raise CheckpointError(f"{path}: not a readable .parquet file (a page of no size)")
        if unpacked > _LARGEST:
            raise CheckpointError(
                f"{path}: a page of {unpacked} bytes, at most {_LARGEST} are read; write it with "
                "smaller pages, or give text or .jsonl"
            )
        largest, at = max(largest, unpacked), at + header + packed
    raise CheckpointError(f"{path}: more than {_MOST_PAGES} pages in one row group")


def _header(path: Path, file: BinaryIO, at: int) -> tuple[int, dict[int, int]]:
    """The length of the page header at the offset `at`, and its integers by their fields."""
    size = _HEADER
    while size <= _LONGEST_HEADER:
        file.seek(at)
        reader = _Compact(file.read(size))
        try:
            integers = reader.struct()
        except IndexError:  # the header is longer than what was read of it
            size *= 4
        else:
            return reader.at, integers
    raise CheckpointError(f"{path}: not a readable .parquet file (a page without a header)")


class _Compact:
    """Reads values of Thrift's compact protocol. Raises IndexError at the end of `raw`."""

    def __init__(self, raw: bytes) -> None:
        self._raw, self.at = raw, 0

    def struct(self, depth: int = 0) -> dict[int, int]:
        """Pass over a struct; its integers by the numbers of their fields."""
        integers: dict[int, int] = {}
        field = 0
        while head := self._byte():
            field = field + (head >> 4) if head >> 4 else self._integer()
            value = self._value(head & 15, depth)
            if value is not None:
                integers[field] = value
        return integers

    def _value(self, kind: int, depth: int) -> int | None:
        match kind:
            case 1 | 2:  # a bool, which is its own value
                return None
            case 3:
                self._skip(1)
            case 4 | 5 | 6:
                return self._integer()
            case 7:
                self._skip(8)
            case 8:
                self._skip(self._varint())
            case 12 if depth < _DEEPEST:
                self.struct(depth + 1)
            case _:  # lists and maps, which no header of a page has
                raise IndexError
        return None

    def _integer(self) -> int:
        value = self._varint()
        return value >> 1 if value % 2 == 0 else -(value >> 1) - 1

    def _varint(self) -> int:
        value = shift = 0
        while (byte := self._byte()) & 128:
            value |= (byte & 127) << shift
            shift += 7
            if shift > 63:
                raise IndexError
        return value | byte << shift

    def _skip(self, size: int) -> None:
        self.at += size
        if self.at > len(self._raw):
            raise IndexError

    def _byte(self) -> int:
        byte = self._raw[self.at]
        self.at += 1
        return byte

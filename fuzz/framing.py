"""Joins several texts into one fuzzer input, and finds how much data a header in it declares."""

import json

SEPARATOR = b"\n\0\n"
_MAX_DATA = 1 << 20


def joined(*texts: bytes) -> bytes:
    """One input of several texts."""
    return SEPARATOR.join(texts)


def data_size(header: bytes) -> int:
    """The largest end of a tensor in `header`, in bytes. 0 if it is invalid or too large."""
    try:
        entries = [e for e in json.loads(header).values() if isinstance(e, dict)]
        ends = [entry["data_offsets"][1] for entry in entries if "data_offsets" in entry]
        size = max(ends, default=0)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return 0
    return size if isinstance(size, int) and 0 <= size <= _MAX_DATA else 0

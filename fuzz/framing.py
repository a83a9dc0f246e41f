"""How several texts are one input of the fuzzer, and how much data a header among them asks for."""

import json

SEPARATOR = b"\n\0\n"
_MOST_DATA = 1 << 20


def joined(*texts: bytes) -> bytes:
    """The input that stands for these texts."""
    return SEPARATOR.join(texts)


def data_size(header: bytes) -> int:
    """The largest end of a tensor that `header` speaks of, if that is not too large."""
    try:
        entries = [e for e in json.loads(header).values() if isinstance(e, dict)]
        ends = [entry["data_offsets"][1] for entry in entries if "data_offsets" in entry]
        size = max(ends, default=0)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        return 0
    return size if isinstance(size, int) and 0 <= size <= _MOST_DATA else 0

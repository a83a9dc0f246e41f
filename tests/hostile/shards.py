"""Invalid safetensors files: truncated, with flipped bits, or made up."""

import json
import pickle
import struct
from typing import Any

from tests.hostile.case import Case, written
from tests.support.model_files import config, framed, shard_bytes, tensors_of

FILE = "model.safetensors"


def with_offsets(*entries: tuple[str, list[Any], int, int], data: int = 4) -> bytes:
    """A shard with F32 tensors (name, shape, start, end) and `data` bytes of data."""
    header = {
        name: {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
        for name, shape, start, end in entries
    }
    return framed(json.dumps(header).encode()) + bytes(data)


ONE = b'"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}'
_SHARDS = {
    "no bytes": b"",
    "seven bytes": b"\0" * 7,
    "length 2**63": struct.pack("<Q", 2**63) + b"{}",
    "length 100 MB": struct.pack("<Q", 100_000_000) + b"{}",
    "length 5 MB, and so it is": framed(b"{" + ONE + b" " * (5 << 20) + b"}") + bytes(4),
    "length beyond the end": struct.pack("<Q", 64) + b"{}",
    "a list": framed(b"[]"),
    "deep nesting": framed(b'{"a":' + b"[" * 5000 + b"]" * 5000 + b"}"),
    "overlap": with_offsets(("a", [1], 0, 4), ("b", [1], 0, 4)),
    "hole": with_offsets(("a", [1], 4, 8), data=8),
    "beyond the end": with_offsets(("a", [2], 0, 8)),
    "negative shape": with_offsets(("a", [-1], 0, 4)),
    "shape 1.0": with_offsets(("a", [1.0], 0, 4)),
    "shape overflow": with_offsets(("a", [2**62, 4], 0, 4)),
    "offsets reversed": with_offsets(("a", [1], 4, 0)),
    "unknown dtype": framed(b"{" + ONE.replace(b"F32", b"F31") + b"}") + bytes(4),
    "a name twice": framed(b"{" + ONE + b"," + ONE + b"}") + bytes(4),
}

_WHOLE = shard_bytes(tensors_of(config()))
_HEADER = 8 + int.from_bytes(_WHOLE[:8], "little")
# These positions skip the metadata, where a flipped bit does no harm.
_FLIPPED = [*range(8), *(100 + (_HEADER - 120) * i // 24 for i in range(24))]


def flipped(position: int) -> bytes:
    """The file with the second highest bit flipped in one byte of its header."""
    changed = bytearray(_WHOLE)
    changed[position] ^= 0x40
    return bytes(changed)


CASES: dict[str, Case] = {
    **{f"shard: {name}": written(FILE, shard) for name, shard in _SHARDS.items()},
    **{
        f"shard cut off after {part}/16": written(FILE, _WHOLE[: len(_WHOLE) * part // 16])
        for part in range(16)
    },
    "shard one byte short": written(FILE, _WHOLE[:-1]),
    "shard one byte long": written(FILE, _WHOLE + b"\0"),
    "shard twice": written(FILE, _WHOLE * 2),
    "a pickle for a shard": written(FILE, pickle.dumps({"model": [1]})),
    **{f"bit flipped in byte {at}": written(FILE, flipped(at), "") for at in _FLIPPED},
}

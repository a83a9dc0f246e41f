"""Finding NaN and infinity in stored tensors without loading a framework."""

import math
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from vllm_gac.checkpoint.headers import TensorInfo
from vllm_gac.checkpoint.tensor_files import ShardFiles

# Bytes of the types a weight may have as integers, and the least of them, signed, that is no
# finite number: all exponent bits set mean infinity or NaN.
_LEAST = {"BF16": ("i2", 0x7F80), "F16": ("i2", 0x7C00), "F32": ("i4", 0x7F800000)}
_CHUNK_BYTES = 1 << 20  # stays in a core's cache between the two passes over it


def is_finite(directory: Path, info: TensorInfo) -> bool:
    """Whether every value of a BF16, F16 or F32 tensor is finite; other types are not looked at.

    Reads the file piecewise, so that memory stays small. Raises CheckpointError if the file has
    changed since its header was read.
    """
    if info.dtype not in _LEAST:
        return True
    integer, _ = _LEAST[info.dtype]
    size = math.prod(info.shape) * np.dtype(integer).itemsize
    buffer = np.empty(min(size, _CHUNK_BYTES), np.uint8)
    with closing(ShardFiles(directory)) as files:
        for offset in range(0, size, _CHUNK_BYTES):
            piece = buffer[: size - offset]
            files.read_into(info, piece.data, offset)
            if not all_finite(piece, info.dtype):
                return False
    return True


def all_finite(raw: "np.ndarray[Any, np.dtype[np.uint8]]", dtype: str) -> bool:
    """Whether the values whose bytes `raw` [bytes] are, of type BF16, F16 or F32, are finite.

    As signed integers the bad positive ones are the largest; as unsigned ones the bad negative
    ones are. Two maxima and no copy: memory is all that it waits for.
    """
    integer, least = _LEAST[dtype]
    sign = 1 << (8 * np.dtype(integer).itemsize - 1)
    for start in range(0, len(raw), _CHUNK_BYTES):
        signed = raw[start : start + _CHUNK_BYTES].view(f"<{integer}")
        unsigned = signed.view(f"<u{integer[1:]}")
        if int(signed.max()) >= least or int(unsigned.max()) >= sign + least:
            return False
    return True

"""Finding NaN and infinity in stored tensors without loading a framework."""

import math
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from vllm_gac.checkpoint.dtypes import DTYPES
from vllm_gac.checkpoint.headers import TensorInfo
from vllm_gac.checkpoint.tensor_files import ShardFiles

# The exponent bits of each dtype. A number whose exponent bits are all set is infinity or NaN, so
# that as an integer of the same size, this is the smallest that stands for no finite number.
_EXPONENT_BITS = {"BF16": 0x7F80, "F16": 0x7C00, "F32": 0x7F800000}
_CHUNK_BYTES = 1 << 20  # stays in a core's cache between the two passes over it


def is_finite(directory: Path, info: TensorInfo) -> bool:
    """Whether every value of a BF16, F16 or F32 tensor is finite; True for any other dtype.

    Reads the file in pieces, so that memory stays small. Raises CheckpointError if the file has
    changed since its header was read.
    """
    if info.dtype not in _EXPONENT_BITS:
        return True
    size = math.prod(info.shape) * DTYPES[info.dtype].bytes
    buffer = np.empty(min(size, _CHUNK_BYTES), np.uint8)
    with closing(ShardFiles(directory)) as files:
        for offset in range(0, size, _CHUNK_BYTES):
            piece = buffer[: size - offset]
            files.read_into(info, piece.data, offset)
            if not all_finite(piece, info.dtype):
                return False
    return True


def all_finite(raw: "np.ndarray[Any, np.dtype[np.uint8]]", dtype: str) -> bool:
    """Whether every value in `raw` [bytes], little-endian BF16, F16 or F32, is finite.

    Read as signed integers, positive infinity and NaN are the largest values; read as unsigned
    integers, the negative ones are. Two maxima without a copy run at the speed of memory.
    """
    least, size = _EXPONENT_BITS[dtype], DTYPES[dtype].bytes
    sign = 1 << (8 * size - 1)
    for start in range(0, len(raw), _CHUNK_BYTES):
        signed = raw[start : start + _CHUNK_BYTES].view(f"<i{size}")
        unsigned = signed.view(f"<u{size}")
        if int(signed.max()) >= least or int(unsigned.max()) >= sign + least:
            return False
    return True

"""Finding NaN and infinity in stored tensors without loading a framework."""

import math
from pathlib import Path

import numpy as np

from vllm_gac.errors import CheckpointError
from vllm_gac.shards import TensorInfo

# Bit patterns of the types a weight may have: (bytes as an unsigned integer, exponent bits).
# All exponent bits set means infinity or NaN.
_EXPONENTS = {"BF16": ("<u2", 0x7F80), "F16": ("<u2", 0x7C00), "F32": ("<u4", 0x7F800000)}
_CHUNK_BYTES = 1 << 24


def is_finite(directory: Path, info: TensorInfo) -> bool:
    """Whether every value of a BF16, F16 or F32 tensor is finite; other types are not looked at.

    Reads the file piecewise, so that memory stays small. Raises CheckpointError if the file is
    shorter than its header said when it was read.
    """
    if info.dtype not in _EXPONENTS:
        return True
    integer, exponent = _EXPONENTS[info.dtype]
    path, left = directory / info.file, math.prod(info.shape) * np.dtype(integer).itemsize
    try:
        with path.open("rb") as file:
            file.seek(info.start)
            while left:
                piece = file.read(min(left, _CHUNK_BYTES))
                if len(piece) < min(left, _CHUNK_BYTES):
                    raise CheckpointError(f"{path}: became shorter while it was read")
                left -= len(piece)
                bits = np.frombuffer(piece, integer)
                if ((bits & exponent) == exponent).any():
                    return False
    except OSError as e:
        raise CheckpointError(f"{path}: cannot be read ({e.strerror or e})") from e
    return True

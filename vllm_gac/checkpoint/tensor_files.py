"""Reading tensors from shards whose headers have been read, and finding what is wrong in them.

Safetensors are read, not memory-mapped. If a file is truncated meanwhile, reading it is an error,
while touching a mapping of it, as a state dict has one, kills the process by a signal. A file that
was replaced or rewritten since its header was read is an error, too.
"""

import math
import mmap
import os
import threading
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vllm_gac.checkpoint.digests import not_as_written
from vllm_gac.checkpoint.dtypes import DTYPES
from vllm_gac.checkpoint.headers import TensorInfo, version_of
from vllm_gac.checkpoint.untrusted_files import open_regular
from vllm_gac.errors import CheckpointError, DiskError
from vllm_gac.errors.sanitize import sanitize

if TYPE_CHECKING:
    import torch

# One system call reads less than 2 GiB.
_CHUNK_BYTES = 1 << 24
_HUGE_PAGE = 1 << 21
# The bits of 65,536 in each dtype. As integers of the same size, larger numbers, infinity and NaN
# are no less. No model is trained to such weights; in a norm, they overflow in the next layers.
_TOO_LARGE = {"BF16": 0x4780, "F16": 0x7C00, "F32": 0x47800000}
OUT_OF_RANGE = "contains NaN or infinity, or a number of 65,536 or more, as no sound model does"
_SMALL_BYTES, _SAMPLE_BYTES = 1 << 16, 1 << 12
_PIECE_BYTES = 1 << 20  # stays in a core's cache between the two passes over it


class ShardFiles:
    """The shards of a model directory. Each is opened once; several threads may read."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._descriptors: dict[str, int] = {}
        self._lock = threading.Lock()

    def close(self) -> None:
        """Close all files."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def read_into(self, info: TensorInfo, buffer: memoryview, offset: int = 0) -> None:
        """Fill `buffer` with the bytes of a tensor, starting at byte `offset` of the tensor.

        Raises CheckpointError if the file has changed since its header was read, and DiskError if
        it cannot be read.
        """
        path, position = self._directory / info.file, info.start + offset
        try:
            if info.mapped is not None:
                raw = info.mapped.reshape(-1).view(DTYPES["U8"].torch).numpy()
                buffer[:] = raw.data[position : position + len(buffer)]
                status = path.stat()
            else:
                descriptor = self._opened(info)
                while buffer:
                    count = os.preadv(descriptor, [buffer[:_CHUNK_BYTES]], position)
                    if count == 0:
                        raise _changed(path)
                    buffer, position = buffer[count:], position + count
                status = os.fstat(descriptor)
        except OSError as e:
            raise DiskError(f"{path}: cannot be read ({e.strerror or e})") from e
        if info.version is not None and version_of(status) != info.version:
            raise _changed(path)

    def fault(self, name: str, info: TensorInfo) -> str | None:
        """A sentence if tensor `name` has other bytes than were written, or values out of range.

        Reads the file in pieces, so that memory stays small. Raises as `read_into`.
        """
        if (info.crc32 is None and info.dtype not in _TOO_LARGE) or info.dtype not in DTYPES:
            return None  # nothing can be wrong with it
        path, checksum, in_range = self._directory / info.file, 0, True
        for piece in self._pieces(info):
            checksum = zlib.crc32(piece.data, checksum)
            in_range = in_range and all_in_range(piece, info.dtype)
        if info.crc32 not in (None, checksum):
            return not_as_written(path, sanitize(name))
        return None if in_range else f"{path}: {sanitize(name)}: {OUT_OF_RANGE}"

    def sample(self, info: TensorInfo) -> bytes:
        """All bytes of a small tensor, such as a norm, or some from the middle of a larger one."""
        if info.dtype not in DTYPES:
            return b""
        size = math.prod(info.shape) * DTYPES[info.dtype].bytes
        sample = bytearray(size if size <= _SMALL_BYTES else _SAMPLE_BYTES)
        self.read_into(info, memoryview(sample), (size - len(sample)) // 2)
        return bytes(sample)

    def are_equal(self, one: TensorInfo, other: TensorInfo) -> bool:
        """Whether two tensors have the same dtype, shape and bytes. Raises as `read_into`."""
        if (one.dtype, one.shape) != (other.dtype, other.shape) or one.dtype not in DTYPES:
            return False
        pieces = zip(self._pieces(one), self._pieces(other), strict=True)
        return all(np.array_equal(mine, theirs) for mine, theirs in pieces)

    def _pieces(self, info: TensorInfo) -> "Iterator[np.ndarray[Any, np.dtype[np.uint8]]]":
        """The bytes of a tensor in pieces."""
        size = math.prod(info.shape) * DTYPES[info.dtype].bytes
        buffer = np.empty(min(size, _PIECE_BYTES), np.uint8)
        for offset in range(0, size, _PIECE_BYTES):
            piece = buffer[: size - offset]
            self.read_into(info, piece.data, offset)
            yield piece

    def tensor(self, name: str, info: TensorInfo, any_value: bool = True) -> "torch.Tensor":
        """Read tensor `name` as it is stored.

        Raises as `read_into`, and CheckpointError if it has other bytes than were written, or
        values out of range unless it may have `any_value`.
        """
        import torch

        stored = DTYPES.get(info.dtype)
        if stored is None:
            raise CheckpointError(
                f"{self._directory / info.file}: {name}: dtype {info.dtype} cannot be read"
            )
        size = math.prod(info.shape) * stored.bytes
        if size < _HUGE_PAGE:
            raw = torch.empty(size, dtype=torch.uint8, device="cpu")
        else:
            raw = torch.frombuffer(_huge_pages(size), dtype=torch.uint8)
        self.read_into(info, raw.numpy().data)
        if info.crc32 is not None and zlib.crc32(raw.numpy().data) != info.crc32:
            raise CheckpointError(not_as_written(self._directory / info.file, name))
        if not any_value and not all_in_range(raw.numpy(), info.dtype):
            raise CheckpointError(f"{self._directory / info.file}: {name}: {OUT_OF_RANGE}")
        return raw.view(stored.torch).view(info.shape)

    def _opened(self, info: TensorInfo) -> int:
        with self._lock:
            if info.file not in self._descriptors:
                path = self._directory / info.file
                self._descriptors[info.file] = open_regular(path, DiskError)
            return self._descriptors[info.file]


def all_in_range(raw: "np.ndarray[Any, np.dtype[np.uint8]]", dtype: str) -> bool:
    """Whether every value in `raw` [bytes] is finite and less than 65,536.

    True for other dtypes than BF16, F16 and F32. Read as signed integers, positive infinity and
    NaN are the largest values; read as unsigned integers, the negative ones are. Two maxima without
    a copy run at the speed of memory.
    """
    if (least := _TOO_LARGE.get(dtype)) is None:
        return True
    size = DTYPES[dtype].bytes
    sign = 1 << (8 * size - 1)
    for start in range(0, len(raw), _PIECE_BYTES):
        signed = raw[start : start + _PIECE_BYTES].view(f"<i{size}")
        unsigned = signed.view(f"<u{size}")
        if int(signed.max()) >= least or int(unsigned.max()) >= sign + least:
            return False
    return True


def _huge_pages(size: int) -> mmap.mmap:
    """New memory, in huge pages if the system has them.

    With small pages, half the time of reading is spent on page faults.
    """
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _changed(path: Path) -> CheckpointError:
    return CheckpointError(f"{path}: has changed since its header was read; try again")

"""Opening untrusted files: pipes, devices and files that are mostly a hole are refused."""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from vllm_gac.errors import CheckpointError, GacError

# A hole takes no space on the disk, so that a file of any length can be made of a few bytes. In a
# file above this size, at least one byte in eight must be stored. Weights that are all zeros are
# stored, except on file systems that compress them to holes, as ZFS does.
_ANY_SIZE = 64 << 20
_FEWEST_STORED = 8
# How many pieces of a file are looked at, at most.
_MAX_PIECES = 10_000


@contextmanager
def opened(path: Path, error: type[GacError] = CheckpointError) -> Iterator[BinaryIO]:
    """Open the regular file `path` for reading.

    Raises `error` with one sentence if `path` is not a regular file or mostly a hole, or if the
    system cannot open or read it.
    """
    try:
        refuse_special(path, error)
        with path.open("rb") as file:
            _refuse_hole(path, file.fileno(), error)
            os.lseek(file.fileno(), 0, os.SEEK_SET)
            yield file
    except GacError:
        raise
    except (OSError, ValueError) as e:  # ValueError: a NUL or a lone surrogate in the path
        raise error(f"{path}: cannot be read ({getattr(e, 'strerror', None) or e})") from e


def refuse_special(path: Path, error: type[GacError] = CheckpointError) -> None:
    """Raise `error` unless `path` is a regular file.

    Opening a pipe may block for ever, and reading a device may never end.
    """
    mode = path.stat().st_mode
    if stat.S_ISFIFO(mode):
        raise error(f"{path}: not a regular file but a pipe; save what it delivers as a file")
    if not stat.S_ISREG(mode):
        raise error(f"{path}: not a regular file")


def _refuse_hole(path: Path, descriptor: int, error: type[GacError]) -> None:
    size = os.fstat(descriptor).st_size
    if size <= _ANY_SIZE:
        return
    stored = at = 0
    for _ in range(_MAX_PIECES):
        try:
            start = os.lseek(descriptor, at, os.SEEK_DATA)
            at = os.lseek(descriptor, start, os.SEEK_HOLE)
        except OSError as e:
            if e.errno != errno.ENXIO:  # the file system does not say where holes are
                return
            break  # the rest of the file is a hole
        stored += at - start
        if stored * _FEWEST_STORED >= size:
            return
    raise error(
        f"{path}: {size} bytes long, of which {stored} are stored, the rest is a hole; "
        "download or write it again"
    )

"""Opening untrusted files: pipes, devices and files that are mostly a hole are refused."""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path

from vllm_gac.errors import CheckpointError, GacError

# A hole takes no space on the disk, so that a file of any length can be made of a few bytes. In a
# file above this size, at least one byte in eight must be stored. Weights that are all zeros are
# stored, except on file systems that compress them to holes, as ZFS does.
_ANY_SIZE = 64 << 20
_MIN_STORED = 8
# How many pieces of a file are looked at, at most.
_MAX_PIECES = 10_000


@contextmanager
def opened(path: Path, error: type[GacError] = CheckpointError) -> Iterator[BufferedReader]:
    """Open the regular file `path` for reading.

    Raises `error` with one sentence if `path` is not a regular file or mostly a hole, or if the
    system cannot open or read it.
    """
    try:
        with os.fdopen(open_regular(path, error), "rb") as file:
            yield file
    except GacError:
        raise
    except (OSError, ValueError) as e:
        raise _unreadable(path, e, error) from e


@contextmanager
def unchanging(path: Path) -> Iterator[Path]:
    """A name of the regular file that is at `path` now, for libraries that open files by name.

    They open this file, whatever is put at `path` meanwhile. Raises CheckpointError as `opened`.
    """
    descriptor = open_regular(path)
    try:
        yield Path("/dev/fd", str(descriptor))
    finally:
        os.close(descriptor)


def open_regular(path: Path, error: type[GacError] = CheckpointError) -> int:
    """Open the regular file `path` for reading, and return its descriptor.

    Opening a pipe may block for ever, and reading a device may never end. Both are refused before
    the file is opened, because opening alone does something to some devices, and once it is open,
    because another file may have taken its place. Raises `error` as `opened`.
    """
    try:
        _refuse_special(path, path.stat().st_mode, error)
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        try:
            _refuse_special(path, os.fstat(descriptor).st_mode, error)
            _refuse_hole(path, descriptor, error)
            os.lseek(descriptor, 0, os.SEEK_SET)
        except BaseException:
            os.close(descriptor)
            raise
    except GacError:
        raise
    except (OSError, ValueError) as e:  # ValueError: a NUL or a lone surrogate in the path
        raise _unreadable(path, e, error) from e
    return descriptor


def _refuse_special(path: Path, mode: int, error: type[GacError]) -> None:
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
        if stored * _MIN_STORED >= size:
            return
    raise error(
        f"{path}: {size} bytes long, of which {stored} are stored, the rest is a hole; "
        "download or write it again"
    )


def _unreadable(path: Path, e: OSError | ValueError, error: type[GacError]) -> GacError:
    return error(f"{path}: cannot be read ({getattr(e, 'strerror', None) or e})")

"""Opening a file of a name that a stranger chose: what is no file, or a hole in one, is refused."""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from vllm_gac.errors import CheckpointError, GacError

# A hole takes no space on the disk, so that a file of a few bytes can be as large as it likes. Of
# files beyond this size one byte in eight must be stored. Weights that are all zeros still are, but
# where the file system compresses as ZFS does, which makes a hole of them.
_ANY_SIZE = 64 << 20
_FEWEST_STORED = 8
# A file of more pieces than this is not looked at to its end.
_MAX_PIECES = 10_000


@contextmanager
def opened(path: Path, error: type[GacError] = CheckpointError) -> Iterator[BinaryIO]:
    """The regular file `path`, opened for reading.

    Raises `error` with one sentence for what is no regular file, for a file that is almost only a
    hole, and if the system fails to open or to read it.
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
            break  # nothing but a hole from here on
        stored += at - start
        if stored * _FEWEST_STORED >= size:
            return
    raise error(
        f"{path}: {size} bytes long, of which {stored} are stored, the rest is a hole; "
        "download or write it again"
    )

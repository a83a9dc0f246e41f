"""Opening untrusted files: pipes, devices and Git LFS pointers are refused."""

import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path

from vllm_gac.errors import CheckpointError, GacError

_LFS_POINTER = b"version https://git-lfs.github.com/spec/"


@contextmanager
def open_untrusted(path: Path, error: type[GacError] = CheckpointError) -> Iterator[BufferedReader]:
    """Open the regular file `path` for reading.

    Raises `error` with one sentence if `path` is not a regular file, or if the system cannot open
    or read it.
    """
    try:
        with os.fdopen(open_regular(path, error), "rb") as file:
            yield file
    except GacError:
        raise
    except (OSError, ValueError) as e:
        raise _unreadable(path, e, error) from e


def read_bounded(path: Path, error: type[GacError], size: int) -> bytes:
    """Read at most `size` bytes from the start of the regular file `path`."""
    with open_untrusted(path, error) as file:
        return file.read(size)


def sha256_of_file(path: Path) -> str:
    """The SHA-256 of a regular file."""
    with open_untrusted(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def open_pinned(path: Path) -> Iterator[Path]:
    """A name of the regular file that is at `path` now, for libraries that open files by name.

    They open this file, whatever is put at `path` meanwhile. Raises CheckpointError as
    `open_untrusted` does.
    """
    descriptor = open_regular(path)
    try:
        yield Path("/dev/fd", str(descriptor))
    finally:
        os.close(descriptor)


def open_regular(path: Path, error: type[GacError] = CheckpointError) -> int:
    """Open the regular file `path` for reading, and return its descriptor.

    Opening a pipe may block for ever, and reading a device may never end. A Git LFS pointer stands
    for a file that was not fetched. Raises `error` as `open_untrusted`.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        try:
            mode = os.fstat(descriptor).st_mode
            if stat.S_ISFIFO(mode):
                raise error(f"{path}: not a regular file but a pipe; save what it delivers")
            if not stat.S_ISREG(mode):
                raise error(f"{path}: not a regular file")
            if os.pread(descriptor, len(_LFS_POINTER), 0) == _LFS_POINTER:
                raise error(
                    f"{path}: this is a Git LFS pointer, not the file itself; fetch it with "
                    "'git lfs pull'"
                )
        except BaseException:
            os.close(descriptor)
            raise
    except GacError:
        raise
    except (OSError, ValueError) as e:  # ValueError: a NUL in the path
        raise _unreadable(path, e, error) from e
    return descriptor


def _unreadable(path: Path, e: OSError | ValueError, error: type[GacError]) -> GacError:
    return error(f"{path}: cannot be read ({getattr(e, 'strerror', None) or e})")

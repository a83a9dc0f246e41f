"""Reading files that somebody else wrote.

Pipes, devices and Git LFS pointers are refused. JSON is bounded in size, and has no key twice and
no NaN.
"""

import codecs
import hashlib
import json
import math
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any

from vllm_gac.errors import CheckpointError, GacError
from vllm_gac.errors.sanitize import sanitize

# The index of Qwen3-235B-A22B has 3.3 MB, that of the largest dense model a tenth of it. Parsed
# JSON takes up to 20 times its size in memory.
MAX_BYTES = 4 * 1024 * 1024
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"


def read_json(
    path: Path, error: type[GacError] = CheckpointError, max_bytes: int = MAX_BYTES
) -> dict[str, Any]:
    """Parse the JSON object in `path`.

    This is stricter than `json.load`, which keeps the last of two equal keys, accepts NaN and
    overflows the stack on deep nesting. Raises `error` with one sentence for what is refused.
    """
    raw = read_bounded(path, error, max_bytes + 1)
    if len(raw) > max_bytes:
        raise error(f"{path}: larger than {max_bytes} bytes, the most JSON that is read")
    return parse_json(raw, str(path), error)


def parse_json(raw: bytes, where: str, error: type[GacError] = CheckpointError) -> dict[str, Any]:
    """Parse UTF-8 `raw` under the same rules; `where` names its origin in error messages."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        for key, value in pairs:
            if key in seen:
                raise error(f"{where}: key {sanitize(repr(key))} appears twice in one object")
            if not _is_finite(value):
                raise error(
                    f"{where}: {sanitize(repr(key))}: NaN, Infinity or too large a number; "
                    "write another number or null"
                )
            seen[key] = value
        return seen

    if raw.startswith(codecs.BOM_UTF8):
        raise error(f"{where}: begins with a byte order mark; save it as UTF-8 without one")
    try:
        parsed = json.loads(raw.decode("utf-8"), object_pairs_hook=unique)
    except GacError:
        raise
    except UnicodeDecodeError as e:
        raise error(f"{where}: not UTF-8 text (byte {e.start}); save it as UTF-8") from e
    except RecursionError as e:
        raise error(f"{where}: JSON is nested too deeply") from e
    except ValueError as e:
        raise error(f"{where}: not valid JSON ({e})") from e
    if not isinstance(parsed, dict):
        raise error(f"{where}: expected a JSON object, got {type(parsed).__name__}")
    return parsed


def _is_finite(value: Any) -> bool:
    """Whether a number, or all numbers of a list, are finite."""
    if isinstance(value, list):
        return all(map(_is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


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

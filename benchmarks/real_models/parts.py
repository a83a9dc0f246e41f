"""A GGUF file in parts, for a machine that reaches nothing and takes a few megabytes at a time."""

import gzip
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from benchmarks.real_models.gguf_model import unneeded_bytes
from vllm_gac.errors import GacError

_ABOUT, _BLOCK = "parts.json", 1 << 22


class _Parts:
    """A file to write to that goes on in the next part whenever one is full."""

    def __init__(self, out: Path, size: int) -> None:
        self._out, self._size, self._left = out, size, 0
        self._file: IO[bytes] | None = None
        self.count = 0

    def write(self, data: bytes) -> int:
        view = memoryview(data)
        while view:
            if not self._left:
                self.close()
                part = self._out / str(self.count) / "part"
                part.parent.mkdir(parents=True)
                self._file, self._left, self.count = part.open("wb"), self._size, self.count + 1
            assert self._file is not None
            written = self._file.write(view[: self._left])
            self._left -= written
            view = view[written:]
        return len(data)

    def flush(self) -> None:
        """What gzip asks of a file."""

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def pack(file: Path, out: Path, size: int) -> int:
    """Write `file` to `out`/0/part, `out`/1/part and so on, each of at most `size` bytes.

    What `convert` does not read is zeros there. Returns the number of parts.
    """
    digest, parts = hashlib.sha256(), _Parts(out, size)
    with gzip.GzipFile("", "wb", 1, parts, mtime=0) as packed:  # type: ignore[arg-type]
        for block in _without_unneeded(file):
            digest.update(block)
            packed.write(block)
    parts.close()
    about = {"parts": parts.count, "sha256": digest.hexdigest()}
    (out / "0" / _ABOUT).write_text(json.dumps(about) + "\n")
    return parts.count


def join(parts: Path, file: Path) -> None:
    """Write what `pack` was given. Raises GacError if a part is missing or not what it was."""
    about = json.loads((parts / "0" / _ABOUT).read_text())
    names = [parts / str(number) / "part" for number in range(about["parts"])]
    if missing := [f"{name}" for name in names if not name.exists()]:
        raise GacError(f"{', '.join(missing)}: missing, of {len(names)} parts")
    whole, digest = file.with_suffix(".gz"), hashlib.sha256()
    with whole.open("wb") as out:
        for name in names:
            out.write(name.read_bytes())
    with gzip.open(whole, "rb") as packed, file.open("wb") as out:
        while block := packed.read(_BLOCK):
            digest.update(block)
            out.write(block)
    whole.unlink()
    if digest.hexdigest() != about["sha256"]:
        raise GacError(f"{file}: not what was packed (its SHA-256 differs); send the parts again")


def _without_unneeded(file: Path) -> Iterator[bytes]:
    start, end = unneeded_bytes(file)
    with file.open("rb") as source:
        at = 0
        while block := source.read(_BLOCK):
            first, last = (min(max(edge - at, 0), len(block)) for edge in (start, end))
            yield block[:first] + bytes(last - first) + block[last:]
            at += len(block)

"""A GGUF file in parts, for a machine that reaches nothing and takes a few megabytes at a time."""

import gzip
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from benchmarks.real_models.gguf_model import unneeded_bytes
from vllm_gac.errors import GacError

PART_BYTES = 50_000_000
_ABOUT, _BLOCK = "parts.json", 1 << 22


def pack(file: Path, out: Path) -> int:
    """Write `file` to `out`/0/part, `out`/1/part and so on, each of at most PART_BYTES.

    What `convert` does not read is zeros there. Returns the number of parts.
    """
    out.mkdir(parents=True)
    whole, digest, count = out / "whole.gz", hashlib.sha256(), 0
    with gzip.open(whole, "wb", 1) as packed:
        for block in _without_unneeded(file):
            digest.update(block)
            packed.write(block)
    with whole.open("rb") as stream:
        while part := stream.read(PART_BYTES):
            (out / str(count)).mkdir()
            (out / str(count) / "part").write_bytes(part)
            count += 1
    whole.unlink()
    about = {"parts": count, "sha256": digest.hexdigest()}
    (out / "0" / _ABOUT).write_text(json.dumps(about) + "\n")
    return count


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

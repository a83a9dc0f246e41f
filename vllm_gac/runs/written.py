"""vllm-gac.json: what a run wrote into a model directory, so that --overwrite removes nothing else.

It has the SHA-256 of each file. A directory without it may hold a model of an earlier release; then
nothing tells which of its files are the user's, and all of them stay.
"""

import hashlib
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from vllm_gac.checkpoint.atomic_files import write_json
from vllm_gac.checkpoint.regular_files import opened
from vllm_gac.checkpoint.strict_json import read_json
from vllm_gac.errors import DiskError
from vllm_gac.errors.shown import shown
from vllm_gac.layout.names import VERSION

RECORD = "vllm-gac.json"
_FORMAT = 1
_MAX_NAMED = 5
_READERS = 4  # of files at a time; a disk that is read by more is no faster
# The digests of files by what changes whenever they do: a model that is replaced is looked at
# before hours of work and after them.
_digests: dict[tuple[int, ...], str] = {}


def record_written(directory: Path) -> None:
    """Write the record of the files in `directory`, all of which a run has just written.

    Raises DiskError if the disk is full.
    """
    paths = sorted(p for p in directory.iterdir() if _is_plain(p) and p.name != RECORD)
    with ThreadPoolExecutor(_READERS) as pool:
        files = dict(zip((path.name for path in paths), pool.map(_sha256, paths), strict=True))
    record = {"record": _FORMAT, "tool": f"vllm-gac {VERSION}", "sha256": files}
    write_json(directory / RECORD, record)


def check_replaceable(out: Path) -> None:
    """Raise DiskError unless everything at `out` is as the record in it says, or nothing is there.

    Files that were removed are no loss.
    """
    if not os.path.lexists(out):
        return
    if out.is_symlink() or not out.is_dir():
        raise DiskError(f"{out}: is not a model directory; --overwrite replaces nothing else")
    recorded = _recorded(out)
    paths = sorted(path for path in out.iterdir() if path.name != RECORD or recorded is None)
    ours = [path for path in paths if path.name in (recorded or {}) and _is_plain(path)]
    if strangers := [path.name for path in paths if path not in ours]:
        missing = "" if recorded is not None else f" (no {RECORD} says so, as none of 0.1.0 does)"
        raise _refusal(out, strangers, f"not known to be written by vllm-gac{missing}")
    with ThreadPoolExecutor(_READERS) as pool:
        found = zip(ours, pool.map(_sha256, ours), strict=True)
        changed = [path.name for path, digest in found if digest != (recorded or {})[path.name]]
    if changed:
        raise _refusal(out, changed, "changed since vllm-gac wrote it")


def remove_written(directory: Path) -> None:
    """Remove a directory that may be replaced. If that is stopped, it may be done again.

    Raises DiskError if it may not be replaced; then nothing is removed.
    """
    check_replaceable(directory)
    for path in sorted(directory.iterdir(), key=lambda path: path.name == RECORD):
        path.unlink()  # the record last
    directory.rmdir()


def _recorded(directory: Path) -> Mapping[str, object] | None:
    """The digests in the record by the names of files; None if there is no record."""
    path = directory / RECORD
    if not _is_plain(path):
        return None
    record = read_json(path, DiskError)
    files = record.get("sha256")
    return files if record.get("record") == _FORMAT and isinstance(files, dict) else None


def _refusal(out: Path, names: Sequence[str], what: str) -> DiskError:
    named = ", ".join(map(shown, names[:_MAX_NAMED]))
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return DiskError(
        f"{out}: {named}{more}: {what}; --overwrite would remove it: move it away, or choose "
        "another output"
    )


def _is_plain(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def _sha256(path: Path) -> str:
    with opened(path, DiskError) as file:
        found = os.fstat(file.fileno())
        version = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
        if version not in _digests:
            _digests[version] = hashlib.file_digest(file, "sha256").hexdigest()
        return _digests[version]

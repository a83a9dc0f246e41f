"""OUT.partial: where a long run keeps its work until OUT is complete.

OUT.partial/run.json   which command works here, with which inputs and options; for --resume
OUT.partial/lock       held while a process works here
OUT.partial/model/     becomes OUT by one rename
OUT.partial/*.safetensors  what calibration has measured, or the state of a healing
OUT.partial/replaced/  the previous OUT, if it may be overwritten

Only a directory with the run.json of a run is ever written to or removed. Anything else under that
name belongs to somebody else: it is left alone, and the run is refused.
"""

import fcntl
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from vllm_gac.checkpoint.atomic_files import TEMPORARY, sync_directory, write_json
from vllm_gac.checkpoint.replaceable import check_replaceable
from vllm_gac.checkpoint.run_difference import difference
from vllm_gac.checkpoint.strict_json import read_json
from vllm_gac.errors import CheckpointError, DiskError, GacError
from vllm_gac.errors.shown import shown

_FORMAT = 1
_RECORD, _LOCK, _MODEL, _REPLACED = "run.json", "lock", "model", "replaced"
# What calibration keeps, also when it is a part of a compression.
_STATS = "stats.safetensors"
_MEASURED = (f"{_STATS}*", "hidden-*.safetensors", "metrics-*.safetensors")
# What compressed layers get, for their refit (steps/refitting.py).
_STREAMS = "streams-*.safetensors"
# The state of a healing (healing/state_file.py).
HEALING = "healing.safetensors"
_TEMPORARIES = (f"{TEMPORARY}*",)  # of writers that were killed
_EMPTY = (_LOCK, *_TEMPORARIES)
_OURS = (_RECORD, _MODEL, _REPLACED, *_MEASURED, _STREAMS, HEALING, *_EMPTY)


@contextmanager
def workspace(
    out: Path, command: str, run: Mapping[str, Any], resume: bool, overwrite: bool = False
) -> Iterator[Path]:
    """The locked workspace OUT.partial of a run of `command`; `run` (JSON values) describes it.

    Its model/ becomes OUT when the block ends without an exception. If the input is refused, only
    the measured statistics stay; after any other failure all work stays, for `resume`. With
    `overwrite`, a model at OUT stays until the new one replaces it. Raises CheckpointError if OUT
    exists (with `overwrite`: if vllm-gac did not write it), if another process works here, if there
    is unfinished work and `resume` is false, if that work is of another run, or if OUT.partial is
    not ours.
    """
    directory = partial_of(out)
    refuse = check_replaceable if overwrite else _refuse_a_model
    refuse(out)
    if recorded(out) is not None and not resume:
        raise CheckpointError(
            f"{directory}: unfinished work of an earlier run; "
            f"continue it with --resume, or remove it{_measured(directory)}"
        )
    with claimed(directory, command, run):
        refuse(out)  # again: another run may have finished meanwhile
        model = directory / _MODEL
        model.mkdir(exist_ok=True)
        _remove_all(model, _TEMPORARIES)
        yield directory
        sync_directory(model)
        publish(model, out, overwrite)


@contextmanager
def claimed(directory: Path, command: str, run: Mapping[str, Any]) -> Iterator[None]:
    """Make `directory` the workspace of this run, or continue in it, and hold its lock.

    Raises CheckpointError if another process holds the lock, or if the directory is of another run
    or not ours.
    """
    _read_record(directory)  # before anything is written there
    directory.mkdir(parents=True, exist_ok=True)
    with _locked(directory):
        before = _read_record(directory)
        _remove_all(directory, _TEMPORARIES)
        if before is None:
            write_json(directory / _RECORD, _record(command, run))
        else:
            _check_same(directory, before, _record(command, run))
        try:
            yield
        except GacError as e:
            # The same input is refused again; only a full disk may have room the next time.
            if not isinstance(e, DiskError):
                _remove_all(directory, (_MODEL, _STREAMS))
            if not any(directory.rglob("*.safetensors")):
                _remove(directory)
            raise


def _measured(directory: Path) -> str:
    """A hint that other runs can use the statistics of this one, if they are complete."""
    if not (directory / _STATS).exists():
        return ""
    return f"; the {_STATS} in it is whole and can be given as --stats"


def publish(product: Path, out: Path, overwrite: bool = False) -> None:
    """Rename `product`, which is in the claimed workspace of `out`, to `out`; end the workspace.

    Raises DiskError if something that must not be replaced is at `out` by now.
    """
    directory = product.parent
    record = read_json(directory / _RECORD)
    # If we are stopped after the rename, the inode tells that this run made `out`.
    write_json(directory / _RECORD, record | {"inode": product.stat().st_ino})
    if overwrite and out.exists():
        check_replaceable(out)
        # A run that is stopped between these two renames is finished when it is resumed.
        out.rename(directory / _REPLACED)
    refuse_existing(out)
    product.rename(out)
    sync_directory(out.parent)
    _remove(directory)


def partial_of(out: Path) -> Path:
    """Where the work for `out` is kept. Raises DiskError if `out` is `.`, `..` or `/`."""
    if out.name in ("", ".."):
        raise DiskError(f"{out}: exists; give the name of something new")
    return out.with_name(out.name + ".partial")


def recorded(out: Path) -> Mapping[str, Any] | None:
    """The description (`run`) of the unfinished run that makes `out`; None if there is none.

    Raises CheckpointError if OUT.partial is not ours.
    """
    record = _read_record(partial_of(out))
    return None if record is None else record["run"]


def finished_before(out: Path, command: str, run: Mapping[str, Any]) -> bool:
    """Whether this run had made OUT already and was stopped before it cleaned up; cleans up.

    Raises CheckpointError if another run was stopped there.
    """
    directory = partial_of(out)
    if not (out.exists() and directory.is_dir()):
        return False
    record = _read_record(directory)
    if record is None:
        if not any(directory.iterdir()):
            directory.rmdir()
        return False
    if record.get("inode") != out.stat().st_ino:
        return False
    with _locked(directory):
        _check_same(directory, record, _record(command, run))
        _remove(directory)
    return True


def refuse_existing(out: Path, hint: str = "") -> None:
    """Raise DiskError if anything is at `out`, even a broken link."""
    if os.path.lexists(out):
        raise DiskError(f"{out}: exists; remove it or choose another output{hint}")


def _refuse_a_model(out: Path) -> None:
    refuse_existing(out, "; --overwrite replaces a model that vllm-gac wrote")


def _remove(directory: Path) -> None:
    """Remove a workspace, except files that no run writes."""
    _remove_all(directory, (_MODEL, _REPLACED, *_MEASURED, _STREAMS, HEALING, *_EMPTY))
    (directory / _RECORD).unlink(missing_ok=True)  # last, because it marks the rest as ours
    with suppress(OSError):
        directory.rmdir()


def _remove_all(directory: Path, patterns: tuple[str, ...]) -> None:
    for path in sorted(directory.iterdir()):
        if not any(fnmatch(path.name, pattern) for pattern in patterns):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _record(command: str, run: Mapping[str, Any]) -> dict[str, Any]:
    return {"workspace": _FORMAT, "command": command, "run": dict(run)}


def _read_record(directory: Path) -> dict[str, Any] | None:
    """The record of the run whose work is in `directory`; None if no run has begun there.

    Raises CheckpointError if the directory holds anything but the work of a run.
    """
    if not os.path.lexists(directory):
        return None
    if not directory.is_dir():
        raise _not_ours(directory, "is not a directory")
    names = sorted(path.name for path in directory.iterdir())
    for name in names:
        if not any(fnmatch(name, pattern) for pattern in _OURS):
            raise _not_ours(directory, f"holds {shown(name)}, which vllm-gac did not write")
    if _RECORD not in names:
        for name in names:
            if not any(fnmatch(name, pattern) for pattern in _EMPTY):
                raise _not_ours(directory, f"has no {_RECORD} of vllm-gac")
        return None
    record = read_json(directory / _RECORD)
    if record.get("workspace") != _FORMAT or not isinstance(record.get("run"), dict):
        raise _not_ours(directory, f"its {_RECORD} is not of this release of vllm-gac")
    return record


def _not_ours(directory: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"{directory}: {why}; work in progress would be kept there: "
        "move it away, or choose another output"
    )


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Hold the lock of an existing directory, which another process may remove meanwhile.

    The system releases the lock if the process dies. Raises CheckpointError if another process
    holds it.
    """
    path, descriptor = directory / _LOCK, None
    try:
        with suppress(FileNotFoundError):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        if descriptor is None or not _acquired(descriptor, path):
            raise CheckpointError(f"{directory}: another process is writing here")
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)


def _acquired(descriptor: int, path: Path) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The previous holder may have finished and removed the file that we opened.
        return path.stat().st_ino == os.fstat(descriptor).st_ino
    except OSError:
        return False


def _check_same(directory: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise CheckpointError unless both records describe the same run."""
    if before.get("command") != now["command"]:
        raise CheckpointError(
            f"{directory}: unfinished work of {before.get('command')}, not of {now['command']}; "
            "remove it, or choose another output"
        )
    if what := difference(before["run"], now["run"]):
        raise CheckpointError(
            f"{directory}: was started {what}; resume with what it was begun with, or remove it"
        )

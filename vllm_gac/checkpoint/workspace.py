"""OUT.partial: where a long run keeps its work until OUT can appear whole.

OUT.partial/run.json   whose work this is and what was asked for, so that --resume continues it
OUT.partial/lock       held while a process works here
OUT.partial/model/     becomes OUT by one rename
OUT.partial/replaced/  what OUT was until then, where it may be overwritten

Only what a run has marked by its run.json is ever written to or removed. Whatever else lies under
that name is somebody's: it is left alone, and the run refused.
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
from vllm_gac.shown import shown

_FORMAT = 1
_RECORD, _LOCK, _MODEL, _REPLACED = "run.json", "lock", "model", "replaced"
# What calibration keeps, its own directory within that of a compression included.
_STATS = "stats.safetensors"
_MEASURED = (f"{_STATS}*", "hidden-*.safetensors")
_TEMPORARIES = (f"{TEMPORARY}*",)  # of writers that were killed
_EMPTY = (_LOCK, *_TEMPORARIES)
_OURS = (_RECORD, _MODEL, _REPLACED, *_MEASURED, *_EMPTY)


@contextmanager
def workspace(
    out: Path, command: str, run: Mapping[str, Any], resume: bool, overwrite: bool = False
) -> Iterator[Path]:
    """The locked workspace OUT.partial of the run of `command` that `run` (JSON values) describes.

    What is put into its model/ becomes OUT when the block is left without an exception. After a
    refusal only what was measured stays; after any other failure all work stays, for `resume`.
    With `overwrite` a model that was at OUT stays until then, and is removed after it. Raises
    CheckpointError if OUT exists (with `overwrite`: if it is not what vllm-gac wrote), if another
    process is at work, if there is unfinished work and not `resume`, if that work is of another
    run, or if OUT.partial is not ours.
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
    """Make `directory` the workspace of this run, or go on in it, and hold its lock meanwhile.

    Raises CheckpointError if another process holds it, or if it is another run's or not ours.
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
            # Refused once, refused again; only a disk gets well.
            if not isinstance(e, DiskError):
                _remove_all(directory, (_MODEL,))
            if not any(directory.rglob("*.safetensors")):
                _remove(directory)
            raise


def _measured(directory: Path) -> str:
    """That what a run measured is good for others, too."""
    if not (directory / _STATS).exists():
        return ""
    return f"; the {_STATS} in it is whole and can be given as --stats"


def publish(product: Path, out: Path, overwrite: bool = False) -> None:
    """Let `product`, which lies in the claimed workspace of `out`, become `out`; end the workspace.

    Raises DiskError if there is something at `out` by now that must not be replaced.
    """
    directory = product.parent
    record = read_json(directory / _RECORD)
    # By this it is known once it was renamed, should we be stopped before the end.
    write_json(directory / _RECORD, record | {"inode": product.stat().st_ino})
    if overwrite and out.exists():
        check_replaceable(out)
        # Stopped between these two renames, the run ends when it is resumed: both models are here.
        out.rename(directory / _REPLACED)
    refuse_existing(out)
    product.rename(out)
    sync_directory(out.parent)
    _remove(directory)


def partial_of(out: Path) -> Path:
    """Where the work for `out` is kept. Raises DiskError for what has no name, `.`, `..` or `/`."""
    if out.name in ("", ".."):
        raise DiskError(f"{out}: exists; give the name of something new")
    return out.with_name(out.name + ".partial")


def recorded(out: Path) -> Mapping[str, Any] | None:
    """What the unfinished run that is to make `out` was asked for; None if there is none.

    Raises CheckpointError if OUT.partial is not ours.
    """
    record = _read_record(partial_of(out))
    return None if record is None else record["run"]


def finished_before(out: Path, command: str, run: Mapping[str, Any]) -> bool:
    """Whether this run was stopped between OUT's appearance and the end of its clean-up; ends it.

    Raises CheckpointError if it was another run that ended so.
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
    """Raise DiskError if there is anything at `out`, even a link to nowhere."""
    if os.path.lexists(out):
        raise DiskError(f"{out}: exists; remove it or choose another output{hint}")


def _refuse_a_model(out: Path) -> None:
    refuse_existing(out, "; --overwrite replaces a model that vllm-gac wrote")


def _remove(directory: Path) -> None:
    """Remove a workspace, but for files that no run puts there."""
    _remove_all(directory, (_MODEL, _REPLACED, *_MEASURED, *_EMPTY))
    (directory / _RECORD).unlink(missing_ok=True)  # last: by it the rest is known as ours
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
    """The record of the run whose work `directory` holds; None if nothing has begun there.

    Raises CheckpointError for whatever is not the work of a run.
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
    """Hold the lock of an existing directory, which may be removed meanwhile.

    The system lets go of it if the process dies. Raises CheckpointError if another one holds it.
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
        # The holder before us may have finished and removed the file that we have opened.
        return path.stat().st_ino == os.fstat(descriptor).st_ino
    except OSError:
        return False


def _check_same(directory: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise CheckpointError unless both records are of the same run."""
    if before.get("command") != now["command"]:
        raise CheckpointError(
            f"{directory}: unfinished work of {before.get('command')}, not of {now['command']}; "
            "remove it, or choose another output"
        )
    if what := difference(before["run"], now["run"]):
        raise CheckpointError(
            f"{directory}: was started {what}; resume with what it was begun with, or remove it"
        )

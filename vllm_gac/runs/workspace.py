"""OUT.partial: where a long run keeps its work until OUT is complete.

OUT.partial/run.json   which command works here, with which inputs and options; for --resume
OUT.partial/lock       held while a process works here
OUT.partial/model/     becomes OUT by one rename
OUT.partial/*.safetensors  what calibration has measured, or the state of a healing
OUT.partial/rows.*      what generate has written, and what it cost

Only a directory with the run.json of a run is ever written to or removed. Anything else under that
name belongs to somebody else: it is left alone, and the run is refused.
"""

import errno
import fcntl
import itertools
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from vllm_gac.checkpoint.atomic_files import TEMPORARY, copy_file, sync_directory, write_json
from vllm_gac.checkpoint.untrusted_files import read_json
from vllm_gac.errors import CheckpointError, CommandError, DiskError, GacError
from vllm_gac.errors.sanitize import sanitize

_FORMAT = 2  # of run.json; work of a release with another one is not continued
_RECORD, _LOCK, _MODEL = "run.json", "lock", "model"
# What calibration keeps, also when it is a part of a compression.
_STATS = "stats.safetensors"
_MEASURED = (
    f"{_STATS}*",
    *(f"{what}-*.safetensors" for what in ("hidden", "metrics", "gradients")),
)
# What was tried for a loss that was asked for (steps/max_loss/search.py).
_TRIED = ("try-*", "tries.json", "dense_score.json")
# The state of a healing (healing/state_file.py).
HEALING = "healing.safetensors"
# What was written so far (steps/generate/rows.py).
_ROWS = ("rows.jsonl", "rows.json", "rows.seen")
_TEMPORARIES = (f"{TEMPORARY}*",)  # of writers that were killed
_EMPTY = (_LOCK, *_TEMPORARIES)
_WORK = (_MODEL, *_MEASURED, *_TRIED, HEALING, *_ROWS, *_EMPTY)
_OURS = (_RECORD, *_WORK)


def check_output(out: Path, resume: bool = False, inputs: Iterable[Path] = ()) -> None:
    """Raise, before any work, what `workspace` would raise about `out` and `inputs`.

    With `resume`, `out` may exist: the same run may have written it.
    """
    directory = partial_of(out)
    _refuse_inputs(out, inputs)
    _remove_empty(directory)
    begun = _read_record(directory) is not None
    if begun or (directory / _LOCK).exists():
        with _locked(directory):
            if begun and not resume and not os.path.lexists(out):
                raise CheckpointError(
                    f"{directory}: unfinished work of an earlier run; continue it with --resume, "
                    f"or remove it{_measured(directory)}"
                )
    if not resume:
        refuse_existing(out)


@contextmanager
def workspace(
    out: Path, command: str, run: Mapping[str, Any], resume: bool, inputs: Iterable[Path] = ()
) -> Iterator[Path]:
    """The locked workspace OUT.partial of a run of `command`; `run` (JSON values) describes it.

    Its model/ becomes OUT when the block ends without an exception. If the input is refused, only
    the measured statistics stay; after any other failure all work stays, for `resume`. Raises
    CheckpointError if another process works here, if there is unfinished work and `resume` is
    false, if that work is of another run, if OUT.partial is not ours, or if one of `inputs` lies
    there; and DiskError if OUT exists.
    """
    directory = partial_of(out)
    check_output(out, resume, inputs)
    with claimed(directory, command, run):
        refuse_existing(out)  # also what another run has finished meanwhile
        model = directory / _MODEL
        if model.is_symlink():
            raise CheckpointError(f"{model}: is a link, not what the stopped run made there")
        model.mkdir(exist_ok=True)
        remove_temporaries(model)
        yield directory
        sync_directory(model)
        publish(model, out)


@contextmanager
def claimed(directory: Path, command: str, run: Mapping[str, Any]) -> Iterator[None]:
    """Make `directory` the workspace of this run, or continue in it, and hold its lock.

    Raises CheckpointError if another process holds the lock, or if the directory is of another run
    or not ours; and DiskError where the output could not appear in the end.
    """
    _read_record(directory)  # before anything is written there
    directory.mkdir(parents=True, exist_ok=True)
    _check_file_system(directory.parent)
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
            # The same input is refused again. A full disk may have room the next time, and the
            # user may mend a command.
            if not isinstance(e, DiskError | CommandError):
                _remove_all(directory, (_MODEL, *_TRIED))
            kept = directory.rglob("*.safetensors"), directory.glob(_ROWS[0])
            if not any(itertools.chain(*kept)):
                _remove(directory)
            raise


def _check_file_system(parent: Path) -> None:
    """Raise DiskError unless a directory can be renamed within `parent`: outputs appear so."""
    with TemporaryDirectory(prefix=TEMPORARY, dir=parent) as near:
        inner, moved = Path(near, _MODEL), Path(f"{near}.moved")
        inner.mkdir()
        try:
            inner.rename(moved)
        except OSError as e:
            raise DiskError(
                f"{parent}: its file system does not let a directory be renamed ({e.strerror}), "
                "so no output can appear there; choose another place"
            ) from e
        moved.rmdir()


def remove_temporaries(directory: Path) -> None:
    """Remove what writers that were killed have left in `directory`."""
    _remove_all(directory, _TEMPORARIES)


def _measured(directory: Path) -> str:
    """A hint that other runs can use the statistics of this one, if they are complete."""
    if not (directory / _STATS).exists():
        return ""
    return f"; move its {_STATS} out first, which is whole and can be given as --stats"


def publish(product: Path, out: Path) -> None:
    """Rename `product`, which is in the claimed workspace of `out`, to `out`; end the workspace.

    Where it cannot be renamed, as it is on another file system or in a lower layer of an overlay,
    it is copied beside `out` before. Raises DiskError if something is at `out` by now.
    """
    try:
        refuse_existing(out)
        product.rename(out)
    except OSError as e:
        if e.errno != errno.EXDEV:
            raise
        with TemporaryDirectory(prefix=TEMPORARY, dir=out.parent) as near:
            copied = Path(near, product.name)
            if product.is_dir():
                copied.mkdir()
            for path in sorted(product.iterdir()) if product.is_dir() else [product]:
                copy_file(path, copied / path.name if product.is_dir() else copied)
            refuse_existing(out)
            copied.rename(out)
    sync_directory(out.parent)
    _remove(product.parent)


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


def end_workspace(out: Path) -> None:
    """Remove what the run that has made `out` left when it was stopped in its last moment.

    Raises CheckpointError if OUT.partial is not ours, or if another process works there.
    """
    directory = partial_of(out)
    if _read_record(directory) is not None:
        with _locked(directory):
            _remove(directory)
    _remove_empty(directory)


def refuse_existing(out: Path) -> None:
    """Raise DiskError if anything is at `out`, even a broken link."""
    if os.path.lexists(out):
        raise DiskError(f"{out}: exists; remove it or choose another output")


def _refuse_inputs(out: Path, inputs: Iterable[Path]) -> None:
    """Raise CheckpointError for an input that lies in OUT.partial, which is removed in the end."""
    directory = partial_of(out)
    for path in inputs:
        if Path(os.path.realpath(path)).is_relative_to(os.path.realpath(directory)):
            raise CheckpointError(
                f"{path}: lies in {directory}, which a run into {out} removes in the end; move it "
                "away, or choose another output"
            )


def _remove(directory: Path) -> None:
    """Remove a workspace, except files that no run writes."""
    _remove_all(directory, _WORK)
    (directory / _RECORD).unlink(missing_ok=True)  # last, because it marks the rest as ours
    _remove_empty(directory)


def _remove_empty(directory: Path) -> None:
    """Remove `directory` if nothing is in it: that is left of a run killed in its last moment."""
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
            raise _not_ours(directory, f"holds {sanitize(name)}, which vllm-gac did not write")
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
    except (BlockingIOError, FileNotFoundError):
        return False
    except OSError as e:
        raise DiskError(
            f"{path}: cannot be locked ({e.strerror}), as on some network file systems; choose "
            "another place"
        ) from e


def _check_same(directory: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Raise CheckpointError unless both records describe the same run."""
    if before.get("command") != now["command"]:
        raise CheckpointError(
            f"{directory}: unfinished work of {before.get('command')}, not of {now['command']}; "
            "remove it, or choose another output"
        )
    if what := _difference(before["run"], now["run"]):
        raise CheckpointError(
            f"{directory}: was started with another {what}; resume with what it was begun with, or "
            "remove it"
        )


def _difference(before: object, now: object, name: str = "") -> str | None:
    """The first item in which two records of JSON values differ, as a path of keys.

    A key that is missing says the same as null.
    """
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for key in {**before, **now}:
            inner = f"{name}.{key}" if name else key
            if difference := _difference(before.get(key), now.get(key), inner):
                return difference
        return None
    if before == now:
        return None
    known = isinstance(before, str | int | float) and isinstance(now, str | int | float)
    return f"{name} ({before}, not {now})" if known else name

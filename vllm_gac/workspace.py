"""OUT.partial: where a long run keeps its work until OUT can appear whole.

OUT.partial/lock       held while a process works here
OUT.partial/run.json   what was asked for, so that --resume continues the same run
OUT.partial/model/     becomes OUT by one rename
"""

import fcntl
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm_gac.durable import sync_directory, write_json
from vllm_gac.errors import CheckpointError, GacError
from vllm_gac.strict_json import read_json

_MODEL = "model"


@contextmanager
def workspace(out: Path, run: Mapping[str, Any], resume: bool) -> Iterator[Path]:
    """The locked workspace OUT.partial of the run that `run` (JSON values) describes.

    What is put into its model/ becomes OUT when the block is left without an exception. After a
    failure the workspace stays for `resume`, unless there is nothing in it to resume. Raises
    CheckpointError if OUT exists, if another process is at work, if there is unfinished work and
    not `resume`, or if that work is of another run.
    """
    directory = partial_of(out)
    _refuse_existing(out)
    if directory.exists() and not resume:
        raise CheckpointError(
            f"{directory}: unfinished work of an earlier run; "
            "continue it with --resume, or remove it"
        )
    directory.mkdir(parents=True, exist_ok=True)
    with locked(directory):
        try:
            _refuse_existing(out)  # again: another run may have finished meanwhile
            _same_run(directory / "run.json", run)
            (directory / _MODEL).mkdir(exist_ok=True)
            yield directory
            sync_directory(directory / _MODEL)
            (directory / _MODEL).rename(out)
            sync_directory(out.parent)
            shutil.rmtree(directory)
        except GacError:
            if not any(directory.rglob("*.safetensors")):
                shutil.rmtree(directory)
            raise


def partial_of(out: Path) -> Path:
    """Where the work for `out` is kept."""
    return out.with_name(out.name + ".partial")


def renamed_before_the_end(out: Path) -> bool:
    """Whether a run was stopped between OUT's appearance and the end of its clean-up; ends it."""
    directory = partial_of(out)
    if not (out.is_dir() and directory.is_dir()) or (directory / _MODEL).exists():
        return False
    with locked(directory):
        shutil.rmtree(directory)
    return True


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold the lock of an existing directory, which may be removed meanwhile.

    The system lets go of it if the process dies. Raises CheckpointError if another one holds it.
    """
    path = directory / "lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        if not _acquired(descriptor, path):
            raise CheckpointError(f"{directory}: another process is writing here")
        yield
    finally:
        os.close(descriptor)


def _acquired(descriptor: int, path: Path) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The holder before us may have finished and removed the file that we have opened.
        return path.stat().st_ino == os.fstat(descriptor).st_ino
    except OSError:
        return False


def _refuse_existing(out: Path) -> None:
    if out.exists():
        raise CheckpointError(f"{out}: exists; remove it or choose another directory")


def _same_run(path: Path, run: Mapping[str, Any]) -> None:
    """Record `run`, or check that it is the one on record."""
    if not path.exists():
        write_json(path, run)
        return
    for key, before in read_json(path).items():
        if run.get(key) != before:
            raise CheckpointError(
                f"{path.parent}: was started with {key} = {before!r}, not {run.get(key)!r}; "
                "resume with the same inputs, or remove it"
            )

"""Every verb that writes what takes long, as a command line on small models; and a run of one.

A child process with torch loaded forks once for each run, so that a run may be killed, and takes no
time to start.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.importers.pickled_models import saved, svd_llm
from tests.steps.healing_models import write_all
from tests.support.dense_models import config, write, write_text

_COMPRESS = ("compress", "dense", "--param-ratio", "0.8", "--max-tokens", "1024")
# The words of each command line, without --out and what belongs to every run.
VERBS: dict[str, tuple[str, ...]] = {
    "compress": (*_COMPRESS, "--sequence-length", "128", "--calibration", "long.txt"),
    "import": ("import", "m.pt"),
    "repair": ("repair", "unaligned"),
    "heal": (
        *("heal", "student", "--teacher", "teacher", "--text", "text.txt", "--tokens", "1792"),
        *("--sequence-length", "32", "--batch-tokens", "256", "--learning-rate", "5e-3"),
    ),
    "calibrate": (
        *("calibrate", "dense", "--text", "long.txt", "--max-tokens", "1024"),
        *("--sequence-length", "128", "--probe-tokens", "0"),
    ),
    "plan": ("plan", "dense", "--param-ratio", "0.8"),
}
# Verbs that write a file; the others write a model directory, and have --resume and --overwrite.
FILES = ("calibrate", "plan")


def write_inputs(directory: Path) -> None:
    """Write what the command lines of `VERBS` name."""
    write(directory / "dense", config())
    write_text(directory / "long.txt")
    write(directory / "unaligned", config(intermediate_size=93))
    saved(directory, svd_llm())
    write_all(directory)


def arguments(verb: str, out: Path, *more: str) -> list[str]:
    """The command line of a verb of `VERBS` that writes to `out`."""
    into = [str(out)] if verb == "import" else ["--out", str(out)]
    quiet = () if verb == "plan" else ("--quiet",)
    device = ("--device", "cpu") if verb in ("compress", "heal", "calibrate") else ()
    return [*VERBS[verb], *into, *quiet, *device, *more]


def forked(action: Callable[[], int], said: Path) -> int:
    """Start `action` in a fork, with its stderr in the file `said`; its status is its result."""
    child = os.fork()
    if child == 0:
        status = 70
        try:
            with said.open("w") as file:
                os.dup2(file.fileno(), 2)
                sys.stderr = file
                status = action()
        except BaseException as e:  # what a user would see as a traceback
            said.write_text(f"Traceback: {type(e).__name__}: {e}")
        finally:
            os._exit(status)
    return child


def ran(
    arguments: list[str],
    directory: Path,
    before: Callable[[], None] = lambda: None,
) -> int:
    """The exit status of `vllm-gac` with these arguments, run in `directory`; -9 if it was killed.

    Its stderr is in the file `said` there. In its process, `before` is called first.
    """
    from vllm_gac.cli import main
    from vllm_gac.healing import train

    def action() -> int:
        train._SAVING = 0  # save the state of a healing each time
        os.chdir(directory)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        before()
        return main(arguments)

    child = forked(action, directory / "said")
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def digest(path: Path) -> str:
    """A digest of the file or directory at `path`; "nothing" if it is not there."""
    if not path.exists():
        return "nothing"
    found = hashlib.sha256()
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        name = file.relative_to(path.parent).as_posix().partition("/")[2]
        found.update(f"{name}\0{file.stat().st_mode:o}\0".encode())
        found.update(file.read_bytes() if file.is_file() else b"")
    return found.hexdigest()


@contextmanager
def small_disk(directory: Path) -> Iterator[Callable[[int], None]]:
    """A disk of its own at `directory`; what is yielded gives it so many bytes.

    Only root, of the machine or of a user namespace, may do so.
    """
    directory.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1g", "tmpfs", directory], check=True)

    def resize(size: int) -> None:
        subprocess.run(["mount", "-o", f"remount,size={size}", directory], check=True)

    try:
        yield resize
    finally:
        subprocess.run(["umount", directory], check=True)
        shutil.rmtree(directory)

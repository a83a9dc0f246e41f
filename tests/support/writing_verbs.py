"""Every verb that writes a model, as a command line on small models; and a run of one.

A child process with torch loaded forks once for each run, so that a run may be killed, and takes no
time to start.
"""

import hashlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.importers.low_rank_models import write_low_rank
from tests.steps.heal.models import FAST, flags, write_all
from tests.support.dense_models import config, write, write_text

_COMPRESS = ("compress", "dense", "--param-ratio", "0.8", "--max-tokens", "1024")
# The words of each command line, without --out and what belongs to every run.
VERBS: dict[str, tuple[str, ...]] = {
    "compress": (*_COMPRESS, "--calibration", "long.txt"),
    "import": ("import", "svd-llm"),
    "repair": ("repair", "unaligned"),
    "export": ("export", "unaligned"),
    "heal": (
        *("heal", "student", "--teacher", "teacher", "--text", "text.txt"),
        *map(str, flags(FAST)),
    ),
    "loss": (
        *("compress", "dense", "--max-loss", "5%", "--held-out", "held-out.txt"),
        *("--method", "heads,prune", "--max-tokens", "1536"),
        *("--calibration", "long.txt"),
    ),
}


def write_inputs(directory: Path) -> None:
    """Write what the command lines of `VERBS` name."""
    write(directory / "dense", config())
    write_text(directory / "long.txt")
    write_text(directory / "held-out.txt", 30_000)
    write(directory / "unaligned", config(intermediate_size=93))
    write_low_rank(directory / "svd-llm", "svd-llm")
    write_all(directory)


def arguments(verb: str, out: Path, *more: str) -> list[str]:
    """The command line of a verb of `VERBS` that writes to `out`."""
    into = [str(out)] if verb == "import" else ["--out", str(out)]
    device = ("--device", "cpu") if verb in ("compress", "loss", "heal") else ()
    return [*VERBS[verb], *into, "--quiet", *device, *more]


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
    verb: str,
    out: Path,
    more: Sequence[str],
    directory: Path,
    before: Callable[[], None] = lambda: None,
) -> int:
    """The exit status of a verb of `VERBS` that writes to `out`, run in `directory`.

    Negative if a signal ended it. Its stderr is in the file `said` there. In its process, `before`
    is called first.
    """
    from vllm_gac import cli
    from vllm_gac.healing import train

    def action() -> int:
        train._SAVING = 0  # save the state of a healing each time
        os.chdir(directory)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        before()
        return cli.main(arguments(verb, out, *more))

    child = forked(action, directory / "said")
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def said(directory: Path) -> str:
    """What the last run in `directory` has said on stderr."""
    return (directory / "said").read_text().strip()


def digest(path: Path) -> str:
    """A digest of the file or directory at `path`; "nothing" if it is not there."""
    if not path.exists():
        return "nothing"
    sha = hashlib.sha256()
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        name = file.relative_to(path.parent).as_posix().partition("/")[2]
        sha.update(f"{name}\0{file.stat().st_mode:o}\0".encode())
        sha.update(file.read_bytes() if file.is_file() else b"")
    return sha.hexdigest()

"""`kill -9` before every N-th change to files: `python -m tests.steps.every_kill DIR VERB N`.

With N of 0 the run may write no file of more than 20,000 bytes instead, as on a full disk. Either
is followed by a run with --resume, which must end in the bytes of an undisturbed one and leave
nothing beside them. Prints, as JSON, how many kills there were and what was wrong.

Changes are what Python's audit hooks report. What safetensors does in Rust no hook reports: the
process is killed with half a file of its own, and once the whole file is there, which only its
owner may read. A child process with torch loaded forks once for each run, so that a run may be
killed, and takes no time to start.
"""

import hashlib
import json
import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tests.importers.low_rank_models import write_low_rank
from tests.steps.heal.models import FAST, flags, write_all
from tests.support.dense_models import config, write, write_text

_CHANGES = {
    "open",
    "os.rename",
    "os.remove",
    "os.rmdir",
    "os.mkdir",
    "shutil.rmtree",
    "os.truncate",
    "os.chmod",
}


def kill_before_change(number: int, out: Path) -> None:
    """Have this process kill itself before its change of this number to what is at `out`."""
    from safetensors import torch as safetensors

    seen, save_file = 0, safetensors.save_file

    def change() -> None:
        nonlocal seen
        seen += 1
        if seen == number:
            os.kill(os.getpid(), signal.SIGKILL)

    def save_in_steps(tensors: Any, path: Path, metadata: Any) -> None:
        beside = path.with_name(".tmpA1b2C3")
        beside.touch(0o600)
        beside.write_bytes(b"half")
        change()
        beside.unlink()
        save_file(tensors, path, metadata)
        change()

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event not in _CHANGES or not any(str(a).startswith(str(out)) for a in arguments):
            return
        if event == "open" and not _writes(arguments[2]):
            return
        change()

    safetensors.save_file = save_in_steps
    sys.addaudithook(hook)


def _writes(flags: object) -> bool:
    return bool(isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR))


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
    from vllm_gac.compression import passes
    from vllm_gac.healing import train

    def action() -> int:
        train._SAVING = passes._KEEP_SECONDS = 0  # save the state each time
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


_LARGEST = (20_000, 20_000)


def main(directory: Path, verb: str, step: int) -> dict[str, object]:
    """Stop a verb in `directory` wherever a step ends, and resume it."""
    write_inputs(directory)
    sound, into = directory / "sound", directory / "into"
    sound.mkdir()
    assert ran(verb, sound / "out", (), directory) == 0, said(directory)
    expected = digest(sound / "out")
    out, wrong, kills = into / "out", [], 0
    while True:
        into.mkdir()
        if step:
            stop = partial(kill_before_change, (kills + 1) * step, out)
        else:
            stop = partial(resource.setrlimit, resource.RLIMIT_FSIZE, _LARGEST)
        status = ran(verb, out, (), directory, stop)
        if step and status != -signal.SIGKILL:
            return {"kills": kills, "wrong": wrong}
        if not step and ("cannot be written" not in said(directory) or out.exists()):
            wrong.append(f"full disk: {said(directory)}")
        kills += 1
        status = ran(verb, out, ("--resume",), directory)
        if status:
            wrong.append(f"stop {kills}: {said(directory)}")
        if digest(out) != expected or list(into.iterdir()) != [out]:
            wrong.append(f"stop {kills}: other bytes, or leftovers")
        shutil.rmtree(into)
        if not step:
            return {"kills": kills, "wrong": wrong}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))))

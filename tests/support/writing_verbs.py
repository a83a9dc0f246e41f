"""Every verb that writes, as a command line on small models; and a run of one.

A child process with torch loaded forks once for each run, so that a run may be killed, and takes no
time to start.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.importers.low_rank_models import write_low_rank
from tests.loadtest.runs import write_run
from tests.steps.heal.models import write_all
from tests.support.dense_models import config, write, write_text

_COMPRESS = ("compress", "dense", "--param-ratio", "0.8", "--max-tokens", "1024")
# The words of each command line, without --out and what belongs to every run.
VERBS: dict[str, tuple[str, ...]] = {
    "compress": (*_COMPRESS, "--calibration", "long.txt"),
    "import": ("import", "svd-llm"),
    "repair": ("repair", "unaligned"),
    "export": ("export", "unaligned"),
    "heal": (
        *("heal", "student", "--teacher", "teacher", "--text", "text.txt", "--tokens", "1792"),
        *("--sequence-length", "32", "--batch-tokens", "256", "--learning-rate", "5e-3"),
    ),
    "calibrate": (
        *("calibrate", "dense", "--text", "long.txt", "--max-tokens", "1024"),
        *("--sequence-length", "128"),
    ),
    "plan": ("plan", "dense", "--param-ratio", "0.8"),
    "picture": ("plan", "dense", "--param-ratio", "0.8"),
    "profile": ("profile",),
    "loss": (
        *("compress", "dense", "--max-loss", "5%", "--held-out", "held-out.txt"),
        *("--method", "heads,prune", "--max-tokens", "1536"),
        *("--calibration", "long.txt"),
    ),
    "schedule": ("schedule", "traffic.yaml"),
    "report": ("report",),
}
# Those that write files, with how the name must end and what else lies beside the first of them;
# the others write a model directory, and have --resume.
FILES: dict[str, tuple[str, tuple[str, ...]]] = {
    "calibrate": (".safetensors", ()),
    "plan": (".json", ()),
    "picture": (".svg", ()),
    "profile": (".json", ()),
    "schedule": (".jsonl", (".traffic.json",)),
    "report": (".html", (".json",)),
}


def write_inputs(directory: Path) -> None:
    """Write what the command lines of `VERBS` name."""
    write(directory / "dense", config())
    write_text(directory / "long.txt")
    write_text(directory / "held-out.txt", 30_000)
    write(directory / "unaligned", config(intermediate_size=93))
    write_low_rank(directory / "svd-llm", "svd-llm")
    write_all(directory)
    (directory / "traffic.yaml").write_text(
        "{name: small, rate: 9, duration: 60, lengths: {input: 20, output: 8}}"
    )
    write_run(directory / "run")


def product(verb: str, directory: Path) -> Path:
    """What the verb writes, or the last that it writes, into this directory."""
    ending, _ = FILES.get(verb, ("", ()))
    return directory / f"out{ending}"


def products(verb: str, directory: Path) -> list[Path]:
    """All that is in this directory after the verb wrote into it."""
    out = product(verb, directory)
    _, beside = FILES.get(verb, ("", ()))
    return sorted([out, *map(out.with_suffix, beside)])


def arguments(verb: str, out: Path, *more: str) -> list[str]:
    """The command line of a verb of `VERBS` that writes to `out`."""
    if verb == "report":
        return [*VERBS[verb], str(out), "run"]
    if verb == "schedule":
        return [*VERBS[verb], str(out)]
    into = {"import": [str(out)], "picture": ["--plot", str(out)]}.get(verb, ["--out", str(out)])
    quiet = () if verb in ("plan", "picture") else ("--quiet",)
    computes = ("compress", "loss", "heal", "calibrate")
    device = ("--device", "cpu") if verb in computes else ()
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
    import loadtest.__main__
    from vllm_gac import cli
    from vllm_gac.healing import train

    def action() -> int:
        train._SAVING = 0  # save the state of a healing each time
        _have_a_gpu()
        os.chdir(directory)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        before()
        main = loadtest.__main__.main if verb in ("schedule", "report") else cli.main
        return main(arguments(verb, out, *more))

    child = forked(action, directory / "said")
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def said(directory: Path) -> str:
    """What the last run in `directory` has said on stderr."""
    return (directory / "said").read_text().strip()


def _have_a_gpu() -> None:
    """Let `profile` find in this process what was measured on an H100."""
    import torch

    from vllm_gac.gpu.profile_files import read_profile
    from vllm_gac.profiling import profile

    measured = read_profile("h100")
    torch.cuda.is_available = lambda: True
    torch.cuda.get_device_name = lambda device=None: measured.gpu
    profile.measure_profile = lambda before, save, **options: measured


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

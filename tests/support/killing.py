"""`kill -9` and a full disk, at every change that a run makes on disk, then --resume.

A child process with torch loaded forks once for each point; the fork counts the changes to files
that Python's audit hooks report, and kills itself with SIGKILL right before the one it was given.
What safetensors does in Rust no hook reports: it is killed with half a file of its own, and once
the whole file is there, which only its owner may read.
"""

import hashlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from vllm_gac.errors import GacError

# Writes its result to the directory given; resumed or not.
Run: TypeAlias = Callable[[Path, bool], None]

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


def run_child(module: str, directory: Path, step: int) -> dict[str, object]:
    """What `python -m module directory step`, which calls `survey`, has found."""
    result = subprocess.run(
        [sys.executable, "-m", module, directory, str(step)],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    summary: dict[str, object] = json.loads(result.stdout)
    return summary


def assert_resumed(summary: dict[str, object], points: int) -> None:
    """From no fewer than `points` kills on, resuming ended in the bytes of an undisturbed run."""
    assert len(summary["killed"]) >= points
    assert set(summary["digests"].values()) == {summary["undisturbed"]}


def assert_disk_was_full(summary: dict[str, object]) -> None:
    """One sentence said so, nothing was left half-written, and resuming ended in the same bytes."""
    assert "cannot be written" in summary["error"]
    assert not summary["out_exists"]
    assert summary["digests"]["full"] == summary["undisturbed"]


def survey(directory: Path, run: Run, step: int) -> dict[str, object]:
    """Digests of what resuming made after a kill at every `step`-th change; 0: after a full disk.

    `undisturbed` is the digest of a run that nobody disturbed.
    """
    out = directory / "out"

    def forked(action: Callable[[], None]) -> int:
        child = os.fork()
        if child == 0:
            try:
                action()
            except GacError as e:
                (directory / "error").write_text(str(e))
            finally:
                os._exit(0)
        return os.waitpid(child, 0)[1]

    def with_small_disk() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        run(out, False)

    forked(lambda: run(directory / "undisturbed", False))
    summary: dict[str, object] = {"undisturbed": _digest(directory / "undisturbed")}
    digests: dict[str, str] = {}
    killed: list[int] = []
    if step == 0:
        forked(with_small_disk)
        summary |= {"error": (directory / "error").read_text(), "out_exists": out.exists()}
        forked(lambda: run(out, True))
        digests["full"] = _digest(out)
    point = step
    while step:

        def run_until_killed(at: int = point) -> None:
            kill_before_change(at, out)
            run(out, False)

        status = forked(run_until_killed)
        if not os.WIFSIGNALED(status):
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
        killed.append(point)
        forked(lambda: run(out, True))
        digests[str(point)] = _digest(out)
        shutil.rmtree(out)
        point += step
    return summary | {"digests": digests, "killed": killed}


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


def _digest(directory: Path) -> str:
    if not directory.is_dir() or directory.with_name(directory.name + ".partial").exists():
        return "unfinished"
    digest = hashlib.sha256()
    for path in sorted(directory.rglob("*")):
        digest.update(f"{path.relative_to(directory)}\0{path.stat().st_mode:o}\0".encode())
        digest.update(path.read_bytes() if path.is_file() else b"")
    return digest.hexdigest()

"""`kill -9` at every change a compression makes on disk, then --resume: the same bytes.

A child process with torch loaded forks once for each point; the fork counts the changes to files
that Python's audit hooks report, and kills itself with SIGKILL right before the one it was given.
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

import pytest

from tests.dense_models import config, write, write_text

_CHANGES = {
    "open",
    "os.rename",
    "os.remove",
    "os.rmdir",
    "os.mkdir",
    "shutil.rmtree",
    "os.truncate",
}


def test_resumes_to_the_same_bytes_wherever_it_was_killed(tmp_path: Path) -> None:
    summary = _run_child(tmp_path, step=4)
    assert len(summary["killed"]) >= 10
    assert set(summary["digests"].values()) == {summary["undisturbed"]}


@pytest.mark.slow
def test_resumes_to_the_same_bytes_from_every_single_point(tmp_path: Path) -> None:
    summary = _run_child(tmp_path, step=1)
    assert len(summary["killed"]) >= 50
    assert set(summary["digests"].values()) == {summary["undisturbed"]}


def test_a_full_disk_leaves_one_sentence_and_resumable_work(tmp_path: Path) -> None:
    summary = _run_child(tmp_path, step=0)
    assert "cannot be written" in summary["error"]
    assert not summary["out_exists"]
    assert summary["digests"]["full"] == summary["undisturbed"]


def _run_child(directory: Path, step: int) -> dict[str, object]:
    write(directory / "model", config())
    write_text(directory / "text.txt")
    result = subprocess.run(
        [sys.executable, "-m", "tests.test_compress_killed", directory, str(step)],
        cwd=Path(__file__).parents[1],
        env=os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return json.loads(result.stdout)


def _child(directory: Path, step: int) -> dict[str, object]:
    from vllm_gac.compress import compress
    from vllm_gac.errors import GacError

    def run(out: Path, resume: bool = False) -> None:
        compress(
            directory / "model",
            out,
            param_ratio=0.8,
            kv_ratio=0.75,
            calibration=[directory / "text.txt"],
            max_tokens=512,
            sequence_length=128,
            resume=resume,
            progress=False,
        )

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

    forked(lambda: run(directory / "undisturbed"))
    summary: dict[str, object] = {"undisturbed": _digest(directory / "undisturbed")}
    digests: dict[str, str] = {}
    killed: list[int] = []
    out = directory / "out"

    def with_small_disk() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        run(out)

    if step == 0:
        forked(with_small_disk)
        summary |= {"error": (directory / "error").read_text(), "out_exists": out.exists()}
        forked(lambda: run(out, resume=True))
        digests["full"] = _digest(out)
    point = step
    while step:
        status = forked(lambda at=point: _kill_before_change(at, out, lambda: run(out)))
        if not os.WIFSIGNALED(status):
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
        killed.append(point)
        forked(lambda: run(out, resume=True))
        digests[str(point)] = _digest(out)
        shutil.rmtree(out)
        point += step
    return summary | {"digests": digests, "killed": killed}


def _kill_before_change(number: int, out: Path, action: Callable[[], None]) -> None:
    seen = 0

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal seen
        if event not in _CHANGES or not any(str(a).startswith(str(out)) for a in arguments):
            return
        if event == "open" and not _writes(arguments[2]):
            return
        seen += 1
        if seen == number:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    action()


def _writes(flags: object) -> bool:
    return bool(isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR))


def _digest(directory: Path) -> str:
    if not directory.is_dir() or directory.with_name(directory.name + ".partial").exists():
        return "unfinished"
    digest = hashlib.sha256()
    for path in sorted(p for p in directory.rglob("*") if p.is_file()):
        digest.update(f"{path.relative_to(directory)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


if __name__ == "__main__":
    print(json.dumps(_child(Path(sys.argv[1]), int(sys.argv[2]))))

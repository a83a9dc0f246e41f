"""Tensor parallelism on two GPUs: the same tokens, how much faster, and what alignment is worth.

    python -m benchmarks.engines.parallel OUT --demo build/demo-gac

`tokens`: the demo model and what `vllm-gac compress` made of it, at TP 1 and 2. `speed`: dense and
compressed models of Llama-3-8B's shape at TP 1 and 2, one of which is aligned before it is sharded
and not after. The engines of a part start together, and measure one after the other. Writes
OUT/parallel.json, of what there is also when an engine failed, and OUT/parallel.md.
"""

import argparse
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.engines.parallel.models import RUNS, SHAPES, Run, write
from benchmarks.engines.parallel.report import page
from vllm_gac import demo

_PARTS = ("tokens", "speed")


def main() -> int:
    """Run the parts, write and print the page; 1 if an engine failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="directory for the results")
    parser.add_argument("--demo", type=Path, default=Path("build/demo-gac"))
    parser.add_argument("--parts", nargs="+", choices=_PARTS, default=_PARTS)
    parser.add_argument("--shape", choices=SHAPES, default="llama3-8b")
    parser.add_argument("--at-once", type=int, default=8, help="engines that are up (default: 8)")
    parser.add_argument("--seconds", type=float, default=540, help="give up then (default: 540)")
    parser.add_argument("--commit", help="git commit, where the sources came without .git")
    args = parser.parse_args()
    deadline = time.monotonic() + args.seconds

    result: dict[str, Any] = {
        "command": f"python -m benchmarks.engines.parallel {shlex.join(sys.argv[1:])}",
        "commit": args.commit or _commit(),
        "date": datetime.now(UTC).date().isoformat(),
        "shape": args.shape,
        "at_once": args.at_once,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    expected = 0
    with tempfile.TemporaryDirectory() as work:
        models = Path(work, "models")
        result["layer"], *_ = write(models, SHAPES[args.shape])
        for part in args.parts:
            if part == "tokens":
                jobs = _tokens_jobs(args.demo, SHAPES[args.shape].engine)
            else:
                jobs = _speed_jobs(models, args.shape)
            expected += len(jobs)
            result[part] = _run(jobs, Path(work, part), args.out, args.at_once, deadline)
            (args.out / "parallel.json").write_text(json.dumps(result, indent=1) + "\n")
    complete = sum(len(result[part]) for part in args.parts) == expected
    if not complete:
        print(f"engines failed, see {args.out}/*.log", file=sys.stderr)
        return 1
    (args.out / "parallel.md").write_text(page(result))
    print(page(result))
    return 0


def _tokens_jobs(compressed: Path, engine: dict[str, Any]) -> list[dict[str, Any]]:
    """The demo model, dense and compressed, on one GPU and on two."""
    return [
        {
            "name": f"{name}, TP {tp}",
            "task": "tokens",
            "model": str(model),
            "tp": tp,
            "options": options,
            "cache_bytes": 1 << 28,
            "engine": engine | {"max_model_len": 1024},
        }
        for name, model, options in (("dense", demo.MODEL, None), ("GAC", compressed, {}))
        for tp in (1, 2)
    ]


def _speed_jobs(models: Path, shape: str) -> list[dict[str, Any]]:
    def job(run: Run) -> dict[str, Any]:
        return {
            "name": run.name,
            "task": "speed",
            "model": str(models / run.model),
            "tp": run.tp,
            "options": run.options,
            "shape": shape,
            "cache_bytes": SHAPES[shape].cache_bytes,
            "engine": SHAPES[shape].engine,
        }

    return [job(run) for run in RUNS]


def _run(
    jobs: Sequence[dict[str, Any]], work: Path, logs: Path, at_once: int, deadline: float
) -> dict[str, dict[str, Any]]:
    """What each job's engine saw, by name, without those that failed."""
    work.mkdir()
    seen = {}
    for first in range(0, len(jobs), at_once):
        group = [
            _start(job, work / f"{first + i}.json", logs)
            for i, job in enumerate(jobs[first : first + at_once])
        ]
        ups = [_appears(out.with_suffix(".up"), process, deadline) for process, out in group]
        for job, (process, out), up in zip(jobs[first:], group, ups, strict=False):
            if up:
                out.with_suffix(".go").touch()
                _appears(out, process, deadline)
            if out.exists():
                seen[job["name"]] = json.loads(out.read_text())
            print(f"{job['name']}: {'measured' if out.exists() else 'failed'}", flush=True)
        for process, _ in group:
            _end(process)
    return seen


def _start(job: dict[str, Any], out: Path, logs: Path) -> tuple[subprocess.Popen[bytes], Path]:
    description = out.with_suffix(".job")
    description.write_text(json.dumps(job | {"out": str(out)}))
    environment = dict(os.environ)
    if job["tp"] == 1:  # taking turns with the GPUs
        environment["CUDA_VISIBLE_DEVICES"] = str(int(out.stem) % 2)
    log = logs / f"{job['task']}-{out.stem}.log"
    with log.open("w") as written:
        command = [sys.executable, "-m", "benchmarks.engines.parallel.engine", str(description)]
        process = subprocess.Popen(
            command, env=environment, stdout=written, stderr=written, start_new_session=True
        )
    return process, out


def _appears(file: Path, process: subprocess.Popen[bytes], deadline: float) -> bool:
    """Wait for a `file` of the process, which may end before, or until the deadline."""
    while not file.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            return file.exists()
        time.sleep(0.1)
    return True


def _end(process: subprocess.Popen[bytes]) -> None:
    """Let an engine that has measured leave in peace, but nothing of it stay."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(20)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _commit() -> str:
    run = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return run.stdout.strip() or "unknown"


if __name__ == "__main__":
    sys.exit(main())

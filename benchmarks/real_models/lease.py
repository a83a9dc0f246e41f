"""Runs jobs on the GPUs of a machine that is lent for minutes, in the order of their worth.

    python -m benchmarks.real_models.lease JOBS.json OUT --gpus 2 --each 3 --seconds 1200

A job is a command with a limit of time. It runs as soon as those that it needs have ended well and
a GPU has room for one more. What fails is written down, and what does not need it goes on. Nothing
begins that cannot be over in time. The log of each job is OUT/logs/NAME.log, and OUT/jobs.jsonl
says what happened.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.common.json_lines import append_line


@dataclass(slots=True)
class Job:
    """A command.

    Attributes:
        name: Its name.
        command: What a shell runs, with CUDA_VISIBLE_DEVICES set.
        expected: Seconds that it should take. It does not begin with less time left.
        limit: Seconds after which it is ended.
        needs: Names of jobs that must have ended well.
        after: Names of jobs that must have ended.
        alone: Whether it has a GPU to itself.
        gpu: Whether it takes a place on a GPU.
    """

    name: str
    command: str
    expected: float
    limit: float
    needs: list[str] = field(default_factory=list)
    after: list[str] = field(default_factory=list)
    alone: bool = False
    gpu: bool = True


def job(
    name: str, command: str, expected: float, *needs: str, gpu: bool = True, **more: Any
) -> dict[str, Any]:
    """A job as it stands in JOBS.json, with the limit that PATIENCE gives it."""
    limit = float(os.environ.get("PATIENCE", "2.5")) * expected
    return {
        "name": name,
        "command": command,
        "expected": expected,
        "limit": limit,
        "needs": needs,
        "gpu": gpu,
        **more,
    }


@dataclass(slots=True)
class _Running:
    job: Job
    process: subprocess.Popen[bytes]
    began: float
    gpu: int | None


class Lease:
    """The machine and what runs on it.

    Args:
        jobs: In the order of their worth.
        out: For logs.
        gpus: How many GPUs there are.
        each: Jobs at a time on each of them.
        seconds: After which nothing runs any more.
    """

    def __init__(
        self, jobs: Sequence[Job], out: Path, gpus: int, each: int, seconds: float
    ) -> None:
        self._waiting, self._out = list(jobs), out
        self._gpus, self._each = gpus, each
        self._begun = time.monotonic()
        self._end = self._begun + seconds
        self._running: list[_Running] = []
        self._done: set[str] = set()
        self._lost: set[str] = set()

    def run(self) -> None:
        """Run all jobs that there is time for."""
        (self._out / "logs").mkdir(parents=True, exist_ok=True)
        while self._waiting or self._running:
            self._reap()
            self._give_up()
            self._start()
            time.sleep(0.2)
        (self._out / "over").touch()

    def _reap(self) -> None:
        for each in list(self._running):
            over = time.monotonic() > min(each.began + each.job.limit, self._end)
            if each.process.poll() is None and not over:
                continue
            _end(each.process.pid)
            status = each.process.wait()
            self._running.remove(each)
            (self._done if status == 0 else self._lost).add(each.job.name)
            self._say(each.job, began=each.began, status="too long" if over else status)

    def _give_up(self) -> None:
        left = self._end - time.monotonic()
        for job in list(self._waiting):
            if late := job.expected > left or self._lost & set(job.needs):
                self._waiting.remove(job)
                self._lost.add(job.name)
                self._say(job, status="no time" if late is True else f"needs {late}")

    def _start(self) -> None:
        held = set[int]()  # left to empty for jobs that are to have one to themselves
        running = {each.job.name for each in self._running}
        for job in list(self._waiting):
            needs = set(job.needs) - self._done | set(job.after) - self._done - self._lost
            gpu = self._place(job, held) if job.gpu and not needs else None
            if needs or (job.gpu and gpu is None):
                if job.alone and needs <= running:  # it is next
                    held |= self._soonest_empty(held)
                continue
            log = (self._out / "logs" / f"{job.name}.log").open("w")
            environment = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": str(gpu)}
            process = subprocess.Popen(
                ["bash", "-c", job.command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | environment,
                start_new_session=True,
            )
            log.close()
            self._running.append(_Running(job, process, time.monotonic(), gpu))
            self._waiting.remove(job)
            running.add(job.name)
            self._say(job, gpu=gpu, status="begins")

    def _place(self, job: Job, held: set[int]) -> int | None:
        """The GPU with most room, if any but those that are `held` has room for the job."""
        on = self._jobs_on_gpus()
        free = [
            gpu
            for gpu in set(on) - held
            if not on[gpu]
            or (not job.alone and len(on[gpu]) < self._each and not any(j.alone for j in on[gpu]))
        ]
        return min(free, key=lambda gpu: len(on[gpu]), default=None)

    def _soonest_empty(self, held: set[int]) -> set[int]:
        """The GPU with the fewest jobs, if not all are `held`."""
        on = self._jobs_on_gpus()
        return set(sorted(set(on) - held, key=lambda gpu: len(on[gpu]))[:1])

    def _jobs_on_gpus(self) -> dict[int, list[Job]]:
        return {
            gpu: [each.job for each in self._running if each.gpu == gpu]
            for gpu in range(self._gpus)
        }

    def _say(
        self, job: Job, *, status: object, began: float | None = None, gpu: int | None = None
    ) -> None:
        now = time.monotonic()
        line = {"job": job.name, "status": status, "at": round(now - self._begun, 1)}
        line |= {} if began is None else {"seconds": round(now - began, 1)}
        line |= {} if gpu is None else {"gpu": gpu}
        append_line(self._out / "jobs.jsonl", line)


def _end(session: int) -> None:
    """Kill every process of a session, engines in groups of their own, too."""
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(int(entry.name)) == session:
                os.kill(int(entry.name), signal.SIGKILL)


def main() -> None:
    """Run the jobs of a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("jobs", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--each", type=int, default=3, help="jobs at a time on each GPU")
    parser.add_argument("--seconds", type=float, default=1200)
    options = parser.parse_args()
    jobs = [Job(**job) for job in json.loads(options.jobs.read_text())]
    Lease(jobs, options.out, options.gpus, options.each, options.seconds).run()


if __name__ == "__main__":
    main()

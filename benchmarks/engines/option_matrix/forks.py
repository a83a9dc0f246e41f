"""Functions in processes that are forked off this one, several at once, each with a time limit.

Hundreds of engines start here, and importing vLLM would be most of each start. A fork has the
imports already, which common/engine_process.py repeats for each engine. In return, this process
must not compute with torch or use a GPU: threads and CUDA do not survive a fork.
"""

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Job:
    """A call of `function(*arguments)` with `env` in the environment; its answer is pickled."""

    name: str
    log: Path
    function: Callable[..., Any]
    arguments: tuple[Any, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Ended:
    """The end of a job: its answer, or one line on why it failed, and the seconds it took.

    `late` jobs were ended by the time limit.
    """

    name: str
    seconds: float
    answer: Any = None
    failure: str | None = None
    late: bool = False


@dataclass(frozen=True)
class _Running:
    job: Job
    process: Any
    answers: Connection
    since: float


def run(jobs: Iterable[Job], at_once: int, seconds: float) -> Iterator[Ended]:
    """Yield each job as it ends; a job that runs longer than `seconds` is killed."""
    waiting, running = list(jobs), list[_Running]()
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                running.append(_start(waiting.pop(0)))
            soonest = min(one.since for one in running) + seconds
            wait([one.answers for one in running], max(0.0, soonest - time.monotonic()))
            for one in list(running):
                if one.answers.poll() or time.monotonic() - one.since >= seconds:
                    running.remove(one)
                    yield _end(one, seconds)
    finally:
        for one in running:
            _kill(one)


def _start(job: Job) -> _Running:
    job.log.parent.mkdir(parents=True, exist_ok=True)
    receiving, sending = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_child, args=(job, sending))
    process.start()
    sending.close()
    return _Running(job, process, receiving, time.monotonic())


def _child(job: Job, sending: Connection) -> None:
    os.setsid()  # so that its children end with it
    log = os.open(job.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(job.env)
    answer = job.function(*job.arguments)
    sys.stdout.flush()  # the receiver may end this process at once
    sys.stderr.flush()
    sending.send(answer)


def _end(one: _Running, limit: float) -> Ended:
    took = time.monotonic() - one.since
    try:
        if not one.answers.poll():
            return Ended(one.job.name, took, failure=f"not done after {limit:.0f} s", late=True)
        return Ended(one.job.name, took, answer=one.answers.recv())
    except EOFError:
        one.process.join(10)
        return Ended(one.job.name, took, failure=f"died with exit code {one.process.exitcode}")
    finally:
        _kill(one)


def _kill(one: _Running) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(
            one.process.pid, signal.SIGKILL
        )  # fails if the process has not made its group yet
    one.process.kill()
    one.process.join()
    one.answers.close()

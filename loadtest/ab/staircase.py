"""Several schedules one after another in one run, and that run split again.

Nothing stops between the steps, as real traffic does not: a request belongs to the step in which it
was due, even if its answer comes in the next one. Only the first step starts with an idle server.
"""

import dataclasses
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest.runs.records import Record, read_records, write_records
from loadtest.runs.run import EARLIER
from loadtest.traffic.schedule import (
    PromptRules,
    Schedule,
    ScheduledRequest,
    fingerprint,
    read_schedule,
    write_schedule,
)
from vllm_gac.checkpoint.atomic_files import write_json


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a staircase.

    Attributes:
        name: names its run.
        schedule: its schedule's file.
        begin: when it begins, in seconds from the start of the run.
        window: what of it counts, in seconds of the step.
    """

    name: str
    schedule: Path
    begin: float
    window: tuple[float, float]


def write_staircase(steps: Sequence[Step], seed: int, path: Path) -> None:
    """Write one schedule of all steps, with prompts drawn from `seed`.

    Steps never share a prompt, even if their schedules have the same hash ids: otherwise a server
    would answer the second one from its prefix cache.
    """
    requests: list[ScheduledRequest] = []
    rules = PromptRules()
    used = 0
    for number, step in enumerate(steps):
        schedule = read_schedule(step.schedule)
        rules = dataclasses.replace(schedule.prompts, seed=seed)
        begin = round(step.begin * 1000)
        for request in schedule.requests:
            moved = {
                "timestamp": request.timestamp + begin,
                "hash_ids": tuple(used + i for i in request.hash_ids),
            }
            if request.session_id is not None:
                moved["session_id"] = f"{number}:{request.session_id}"
            requests.append(request.model_copy(update=moved))
        used += 1 + max((max(r.hash_ids, default=0) for r in schedule.requests), default=0)
    write_schedule(Schedule(tuple(requests), rules, {}), path)


def split_into_runs(
    directory: Path,
    steps: Sequence[Step],
    runs: Sequence[Path],
    about: Mapping[str, Any],
) -> None:
    """Split the run of a staircase into one run per step.

    A request belongs to the step in which it was due. A step's run also has the records of requests
    that were due before the step and still under way when it began: their tokens are part of the
    step's throughput.

    Client processes are judged as a whole: every step gets the health files of the staircase.

    Args:
        directory: the run of the staircase.
        steps: its steps, in order.
        runs: one directory per step, to be created.
        about: what run.json records of the server.
    """
    info = json.loads((directory / "run.json").read_text(encoding="utf-8"))
    records = read_records(sorted(directory.glob("records.*.jsonl")))
    first = 0
    for step, run in zip(steps, runs, strict=True):
        schedule = read_schedule(step.schedule)
        run.mkdir(parents=True)
        write_schedule(schedule, run / "schedule.jsonl")
        mine = [r for r in records if first <= r.index < first + len(schedule.requests)]
        before = [r for r in records if r.index < first and not r.ended <= step.begin]
        due = [_due(r, schedule.requests[r.index - first], step) for r in mine]
        write_records(
            [_moved(r, first, step, at) for r, at in zip(mine, due, strict=True)],
            run / "records.0.jsonl",
        )
        write_records(
            [_moved(r, first, step, r.scheduled - step.begin) for r in before], run / EARLIER
        )
        for health in directory.glob("health.*.json"):
            shutil.copyfile(health, run / health.name)
        mine_info = info | {
            "start_at": info["start_at"] + step.begin,
            "schedule_sha256": fingerprint(run / "schedule.jsonl"),
            "window": list(step.window),
            **about,
        }
        write_json(run / "run.json", mine_info)
        first += len(schedule.requests)


def _due(record: Record, request: ScheduledRequest, step: Step) -> float:
    """When a request was due, in seconds of its step, as its schedule says it if nothing else does.

    A turn of a session is due when the answer before it has come.
    """
    due = request.timestamp / 1000
    return due if request.session_id is None else max(due, record.scheduled - step.begin)


def _moved(record: Record, first: int, step: Step, scheduled: float) -> Record:
    """The record in the numbers and the seconds of a step whose first request is `first`."""
    return dataclasses.replace(
        record,
        index=record.index - first,
        scheduled=scheduled,
        sent=record.sent - step.begin,
        tokens=[token - step.begin for token in record.tokens],
        ended=record.ended - step.begin,
    )

"""A batching server in virtual time: what a run of minutes would record, in milliseconds.

It schedules as vLLM does. A step decodes one token of every running request, and fills what is left
of the step's token budget with the oldest prompts. A step takes a fixed time, and more for each
running request and each prompt token; no two steps take exactly as long. So queues, batches and
their memory are those of a real server. There are no sockets and no clock, so thousands of runs
tell how often an interval covers the truth.
"""

import heapq
import math
from collections import deque
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from random import Random

from loadtest.runs.health import ProcessHealth
from loadtest.runs.records import Record
from loadtest.runs.run import Run
from loadtest.runs.verdict import judge
from loadtest.traffic.generate import generate
from loadtest.traffic.scenario import Scenario
from loadtest.traffic.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Speed:
    """The time of one step: `step` + `per_request` x running + `per_token` x prompt tokens.

    Times are in seconds. The defaults are near an 8B model in bf16 on one H200.

    Attributes:
        step: a step without any work.
        per_request: what each running request adds.
        per_token: what each prompt token adds.
        requests: how many requests run at a time, at most.
        tokens: how many tokens one step computes, at most.
        jitter: the standard deviation of a step's time, as a fraction of it.
    """

    step: float = 0.005
    per_request: float = 0.00006
    per_token: float = 0.00004
    requests: int = 256
    tokens: int = 2048
    jitter: float = 0.02

    def times(self, factor: float) -> "Speed":
        """The same server, slower by `factor`."""
        return Speed(
            self.step * factor,
            self.per_request * factor,
            self.per_token * factor,
            self.requests,
            self.tokens,
            self.jitter,
        )


def simulated_run(scenario: Scenario, speed: Speed, label: str, window: tuple[float, float]) -> Run:
    """A run of `scenario` against a simulated server. `window` counts, in seconds of the run."""
    schedule = generate(scenario)
    records = serve(schedule, speed)
    health = [ProcessHealth(0, 0.1, 0.0, 0.0, 0.0)]
    info = {
        "label": label,
        "start_at": 0.0,
        "processes": 1,
        "window": list(window),
        "schedule_sha256": f"{scenario.name}-{scenario.rate:g}-{scenario.seed}",
    }
    verdict = judge(records, health, len(records), 1)
    return Run(Path(label), info, schedule, records, health, verdict, {})


def serve(schedule: Schedule, speed: Speed) -> list[Record]:
    """The records of all requests of `schedule`, each sent when it was due.

    The turns of a session wait for the answers before them, and find the prompt before in a cache.
    """
    requests = schedule.requests
    sessions = schedule.sessions()
    following = {turn: after for turns in sessions for turn, after in pairwise(turns)}
    cached = {after: requests[turn].input_length for turn, after in following.items()}
    due = [request.timestamp / 1000 for request in requests]
    waiting = [(due[turns[0]], turns[0]) for turns in sessions]  # a heap: when due, and which
    heapq.heapify(waiting)
    ends: list[float] = []  # when each step ended
    first: dict[int, int] = {}  # the step of each request's first token
    prompts: deque[list[int]] = deque()  # [request, prompt tokens that are left], oldest first
    decoding: list[tuple[int, int]] = []  # a heap: in which step a running request ends, and which
    now = 0.0
    # By the schedule's own seed, but not in the same steps for two servers of other speeds.
    random = Random(f"{schedule.prompts.seed} {speed}")
    while waiting or prompts or decoding:
        if not prompts and not decoding:
            now = max(now, waiting[0][0])
        while waiting and waiting[0][0] <= now and len(prompts) + len(decoding) < speed.requests:
            index = heapq.heappop(waiting)[1]
            prompts.append([index, requests[index].input_length - cached.get(index, 0)])
        running = len(decoding)
        budget = speed.tokens - running
        computed = 0
        started = []
        while prompts and computed < budget:
            part = min(prompts[0][1], budget - computed)
            prompts[0][1] -= part
            computed += part
            if prompts[0][1] == 0:
                started.append(prompts.popleft()[0])
        seconds = speed.step + speed.per_request * running + speed.per_token * computed
        now += seconds * math.exp(random.gauss(0.0, speed.jitter))
        step = len(ends)
        ends.append(now)
        for index in started:
            first[index] = step
            heapq.heappush(decoding, (step + requests[index].output_length - 1, index))
        while decoding and decoding[0][0] <= step:
            after = following.get(heapq.heappop(decoding)[1])
            if after is not None:
                due[after] = max(due[after], now + requests[after].delay / 1000)
                if due[after] < schedule.ends:
                    heapq.heappush(waiting, (due[after], after))
    return [
        _record(index, schedule, due[index], ends[start : start + requests[index].output_length])
        for index, start in sorted(first.items())
    ]


def _record(index: int, schedule: Schedule, due: float, tokens: list[float]) -> Record:
    request = schedule.requests[index]
    record = Record(index, due, request.input_length, request.output_length, sent=due)
    record.tokens, record.ended, record.status = tokens, tokens[-1], 200
    record.prompt_tokens, record.completion_tokens = request.input_length, len(tokens)
    return record

"""Send each request when it is due, whether or not earlier requests were answered (open loop).

A client that waits for an answer before its next request slows down together with the server, and
hides its queues. Only the turns of one session wait for each other; sessions begin when the
schedule says. Under locust these threads are greenlets.
"""

import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from loadtest.client.client import refuse_another_length, request_body, send
from loadtest.runs.records import Record
from loadtest.runs.target import Target
from loadtest.traffic.schedule import Schedule

# Why a turn of a session was not sent.
_LOST = "not sent: the turn before it failed"
_LATE = "not sent: the traffic had ended when it was due"
_STOPPED = "not sent: the run was stopped"


@dataclass(frozen=True, slots=True)
class Share:
    """The sessions of one of `count` processes: every `count`-th one, starting at `index`."""

    index: int = 0
    count: int = 1


def replay(
    schedule: Schedule,
    target: Target,
    share: Share,
    start_at: float,
    drain: float,
    on_record: Callable[[Record], None],
    stopped: threading.Event | None = None,
) -> None:
    """Replay one share of `schedule`. It starts at `start_at` (seconds since the epoch).

    Calls `on_record` when a request ends, and returns when all requests have ended. Requests that
    are unanswered `drain` seconds after the last arrival are given up. Setting `stopped` ends the
    sending; who is unanswered `drain` seconds later has no record.
    """
    clock = _clock(start_at)
    deadline = schedule.duration + drain
    sending = _Sending(schedule, target, clock, deadline, on_record, stopped)
    running: list[threading.Thread] = []
    for turns in schedule.sessions()[share.index :: share.count]:
        first = turns[0]
        record = sending.record(first, schedule.requests[first].timestamp / 1000)
        # Build the body before the request is due: a long prompt takes milliseconds.
        body = sending.body(first)
        if not _wait_until(record.scheduled, clock, stopped):
            break
        thread = threading.Thread(
            target=sending.session, args=(record, body, turns[1:]), daemon=True
        )
        thread.start()
        running.append(thread)
    give_up = min(deadline, clock() + drain) + 5
    for thread in running:
        thread.join(max(give_up - clock(), 0.1))


@dataclass(frozen=True, slots=True)
class _Sending:
    """What all requests of a replay have in common."""

    schedule: Schedule
    target: Target
    clock: Callable[[], float]
    deadline: float
    on_record: Callable[[Record], None]
    stopped: threading.Event | None

    def record(self, index: int, due: float) -> Record:
        request = self.schedule.requests[index]
        return Record(index, due, request.input_length, request.output_length)

    def body(self, index: int) -> bytes:
        request = self.schedule.requests[index]
        return request_body(self.target, request, index, self.schedule.prompts)

    def session(self, record: Record, body: bytes, later: Sequence[int]) -> None:
        """Send a request that is due, then the later turns of its session, each when it is due."""
        self.send(record, body)
        self.on_record(record)
        for index in later:
            request = self.schedule.requests[index]
            due = max(request.timestamp / 1000, record.ended + request.delay / 1000)
            why_not = self._why_not(record, due)
            record = self.record(index, due)
            if why_not is None:
                body = self.body(index)  # before the turn is due, as that of the first one
                if _wait_until(due, self.clock, self.stopped):
                    self.send(record, body)
                else:
                    why_not = _STOPPED
            if why_not is not None:
                record.error, record.ended = why_not, due
            self.on_record(record)

    def send(self, record: Record, body: bytes) -> None:
        send(self.target, body, record, self.clock, self.deadline)
        refuse_another_length(self.target, self.schedule.requests[record.index], record)

    def _why_not(self, before: Record, due: float) -> str | None:
        """Why the turn after `before` is not sent, if it is not."""
        if not before.ok:
            return before.error if math.isnan(before.sent) else _LOST
        return _LATE if due >= min(self.schedule.ends, self.deadline) else None


def _clock(start_at: float) -> Callable[[], float]:
    """A clock of seconds since `start_at`. Later steps of the wall clock do not change it."""
    offset = time.time() - time.perf_counter() - start_at
    return lambda: time.perf_counter() + offset


def _wait_until(due: float, clock: Callable[[], float], stopped: threading.Event | None) -> bool:
    while (left := due - clock()) > 0:
        # Sleep in short pieces, so that a run can also be stopped while it sends nothing.
        time.sleep(min(left, 0.2))
        if stopped is not None and stopped.is_set():
            return False
    return stopped is None or not stopped.is_set()
